"""Does libep_cuda.so hold code for all GPUs that it is for?

    tests/cuda_archs.py BUILD

Where there is a CUDA compiler it must be there, each of its CUDA files compiled for each architecture below, and with
kernels for groups over nodes if NCCL's headers were found. A line for each of these. Without a compiler it exits with 77.
"""
import os
import re
import shutil
import struct
import sys

ARCHITECTURES = (90, 100)  # Hopper, Blackwell: CMAKE_CUDA_ARCHITECTURES in cmake/cuda.cmake
OVER_NODES = ("ll_serve_net", "ht_serve_net")  # CUDA files, each with a kernel "serve"

# What nvcc puts into .nv_fatbin: for each CUDA file a header and its entries, each of which is PTX or code of one
# architecture.  cuobjdump --list-elf says the same, but not every installation of a compiler has it.
FATBIN, FATBIN_MAGIC = struct.Struct("<IHHQ"), 0xBA55ED50  # magic, version, bytes of this, bytes of the entries
ENTRY, CODE = struct.Struct("<HHIQIIHHI"), 2               # kind, , bytes of this, bytes that follow, , , , , architecture
SECTION = struct.Struct("<IIQQQQ")                         # name, type, flags, address, offset, bytes
FAILED, SKIPPED = 1, 77


def compiler():
    """As cmake/cuda.cmake looks for one."""
    if os.environ.get("CUDACXX"):
        return shutil.which(os.environ["CUDACXX"])
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    path = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(path))


def cached(build, name):
    """A variable of CMake's; "" when there is none, or when what it names was not found."""
    with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as f:
        found = re.search(r"^%s:\w+=(.*)$" % name, f.read(), re.M)
    return found[1] if found and not found[1].endswith("NOTFOUND") else ""


def section(elf, wanted):
    """(offset, end) in the file."""
    start, = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [SECTION.unpack_from(elf, start + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        if elf[at:elf.index(b"\0", at)] == wanted:
            return offset, offset + length
    return 0, 0


def code(elf):
    """For each CUDA file the architectures that it has code of."""
    at, end = section(elf, b".nv_fatbin")
    files = []
    while at < end:
        magic, _, header, length = FATBIN.unpack_from(elf, at)
        if magic != FATBIN_MAGIC:
            at += 8  # files are aligned
            continue
        entry, at = at + header, at + header + length
        files.append(set())
        while entry < at:
            kind, _, header, length, _, _, _, _, architecture = ENTRY.unpack_from(elf, entry)
            if kind == CODE:
                files[-1].add(architecture)
            entry += header + length
    return files


def report(good, name, bad):
    print("ok   %s" % name if good else "FAIL %s: %s" % (name, bad))
    return bool(good)


def check(build, elf):
    files = code(elf)
    good = report(files, "CUDA files in libep_cuda.so", "there is none")
    for architecture in ARCHITECTURES:
        having = sum(architecture in file for file in files)
        good &= report(having == len(files) > 0, "code of sm_%d" % architecture,
                       "%d of %d CUDA files have it" % (having, len(files)))
    for file in OVER_NODES:
        if cached(build, "EP_NCCL_INCLUDE"):
            good &= report(re.search(rb"_%s_cu_\w+5serveE" % file.encode(), elf), "kernel of %s.cu" % file,
                           "it is not there, and NCCL's headers are in %s" % cached(build, "EP_NCCL_INCLUDE"))
        else:
            print("skip kernel of %s.cu: nccl_device.h, a header of NCCL's, was not found" % file)
    return good


def main():
    build = sys.argv[1]
    library = os.path.join(build, "lib", "libep_cuda.so")
    if not compiler():
        print("no CUDA code is compiled: there is no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda")
        sys.exit(SKIPPED)
    if cached(build, "EP_CUDA") == "OFF":
        print("no CUDA code is compiled: EP_CUDA is OFF in %s/CMakeCache.txt" % build)
        sys.exit(SKIPPED)
    if not report(os.path.exists(library), "libep_cuda.so", "it was not built, and there is %s" % compiler()):
        sys.exit(FAILED)
    with open(library, "rb") as f:
        sys.exit(0 if check(build, f.read()) else FAILED)


if __name__ == "__main__":
    main()
