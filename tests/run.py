"""Builds the project in every way the tests need and runs them all.  Started by tests/run.sh.

A task is one program: a unit test program, one file of integration tests, a fuzz target, a script.
Its name says where it belongs ("asan/integration/test_attach"), and it may hold many cases; cases are
what is counted.  Each task gets a TMPDIR of its own and a mark in its environment; when it is over,
a process that still carries the mark, a file left in TMPDIR or a sanitizer's report is a failure.

Logs are in build/test-logs/.
"""
import argparse
import concurrent.futures
import dataclasses
import glob
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TESTS = os.path.join(ROOT, "tests")
BUILD = os.path.join(ROOT, "build")
LOGS = os.path.join(BUILD, "test-logs")

JOBS = len(os.sched_getaffinity(0))
FUZZ_S = 60
FAULTS_S = 120
HT_FAULTS_S = 60
CHANGES = 10
CASE_S = 180         # one case of an integration test, times TIME_SCALE
FILE_S = 1200        # all cases of one file
UNIT_S = 120         # a unit test program, where ctest does not say
BUILD_S = 900
SCRIPT_S = 600
GPU_S = 1800         # tests/gpu
COMPUTE_S = 3600     # what gets only what others leave of the cores
TIME_SCALE = {"release": 1, "asan": 3, "tsan": 5}
VALGRIND_SCALE = 5
EXIT_GRACE_S = 3     # a killed child may need a moment to be gone
SHOWN_LINES = 80     # of a failure's output
SKIPPED = 77         # exit code of a test that cannot run here

MARK = "TEST_RUN_MARK"   # environment variable; without EP_, which the harness takes out
RUN_ID = uuid.uuid4().hex


@dataclasses.dataclass
class Case:
    name: str
    outcome: str  # "passed", "failed" or "skipped"
    output: str = ""


def parse_script(task, code, output):
    """One case: the exit code decides."""
    outcome = {0: "passed", SKIPPED: "skipped"}.get(code, "failed")
    return [Case(task.name, outcome, output + "\n" + ended(task, code))]


@dataclasses.dataclass
class Task:
    name: str
    command: list
    timeout_s: float
    env: dict = dataclasses.field(default_factory=dict)
    parse: object = parse_script  # (task, exit code or None after a timeout, output) -> [Case]
    computes: bool = False        # and no more: it neither waits for a clock nor is waited for

    @property
    def stem(self):
        return os.path.join(LOGS, self.name.replace("/", "-"))

    @property
    def log(self):
        return self.stem + ".log"

    @property
    def results(self):
        """What run_unittest.py writes."""
        return self.stem + ".jsonl"


def ended(task, code):
    return "did not end within %d s" % task.timeout_s if code is None else "exit code %d" % code


# ---- running one task ---------------------------------------------------------------


def processes_with(mark):
    """{pid: command line} of the processes whose environment holds mark."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/environ" % entry, "rb") as f:
                if mark.encode() not in f.read():
                    continue
            with open("/proc/%s/cmdline" % entry, "rb") as f:
                found[int(entry)] = f.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # gone, or somebody else's
    return found


def kill_marked(mark):
    for pid in processes_with(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def leftover_processes(mark):
    deadline = time.monotonic() + EXIT_GRACE_S
    while (found := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_marked(mark)
    return found


def execute(task, env, mark):
    """Runs the task's command with its output in its log.  Returns the exit code, None after a timeout."""
    with open(task.log, "wb") as out:
        # No session of its own: Linux shares the cores out between sessions first (sched(7), autogroup), and on two
        # cores one can be kept from running for seconds then, whatever the priorities of its threads.
        nice = ["nice", "-n", "19"] if task.computes else []
        child = subprocess.Popen(nice + task.command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                 cwd=ROOT, env={**os.environ, **env, MARK: mark}, process_group=0)
        try:
            return child.wait(task.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return None


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    except OSError:
        return ""


def temporary_directory(where, prefix):
    """Short, since a unix socket's path has at most 107 bytes, and open to the other users that tests become."""
    path = tempfile.mkdtemp(prefix=prefix, dir=where)
    os.chmod(path, 0o711)
    return path


def run_task(task, base):
    """Runs one task and returns its cases and how long it took."""
    began = time.monotonic()
    mark = "%s-%s" % (RUN_ID, uuid.uuid4().hex)
    tmp = temporary_directory(base, "")
    reports = task.stem + ".report"
    env = {k: v.replace("@REPORTS@", reports) for k, v in task.env.items()}

    code = execute(task, {"TMPDIR": tmp, **env}, mark)
    cases = task.parse(task, code, read(task.log))

    left = leftover_processes(mark)
    if left:
        cases.append(Case(task.name + ":processes", "failed",
                          "left processes behind: " + ", ".join("%d (%s)" % p for p in left.items())))
    files = sorted(os.listdir(tmp))
    if files:
        cases.append(Case(task.name + ":files", "failed", "left files behind in TMPDIR: " + ", ".join(files)))
        shutil.rmtree(tmp, ignore_errors=True)
    for report in sorted(glob.glob(glob.escape(reports) + ".*")):
        cases.append(Case("%s:%s" % (task.name, os.path.basename(report)), "failed", read(report)))
    return cases, time.monotonic() - began


# ---- what a task's output says -------------------------------------------------------


def parse_build(task, code, output):
    """Nothing to count, unless it failed."""
    return [] if code == 0 else parse_script(task, code, output)


def parse_cmocka(task, code, output):
    """One case per cmocka test; a program that says nothing of the kind is one case itself."""
    outcomes = {}
    for word, name in re.findall(r"^\[ +(OK|FAILED|SKIPPED) +\] (\w+)$", output, re.M):
        outcomes[name] = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[word]
    cases = [Case("%s:%s" % (task.name, name), outcome, output if outcome == "failed" else "")
             for name, outcome in outcomes.items()]
    if not cases or (code != 0 and "failed" not in outcomes.values()):
        cases += parse_script(task, code, output)  # a crash after the last test too
    return cases


def parse_lines(task, code, output):
    """One case per line of what tests/gpu, gin and model say; a program that says nothing of the kind is one itself."""
    if code == SKIPPED:
        return [Case(task.name, "skipped", output)]
    outcomes = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}
    cases = [Case("%s:%s" % (task.name, name), outcomes[word], output if word == "FAIL" else rest)
             for word, name, rest in re.findall(r"^(ok|FAIL|skip) +(.*?)((?: \([\d.]+ s\)|: .*)?)$", output, re.M)]
    if not cases or (code != 0 and "failed" not in {c.outcome for c in cases}):
        cases += parse_script(task, code, output)
    return cases


def parse_unittest(task, code, output):
    """The cases that run_unittest.py wrote down; the one it died in failed."""
    cases, started, finished = [], "start", False
    for line in map(json.loads, read(task.results).splitlines()):
        if "started" in line:
            started = line["started"]
        elif "finished" in line:
            finished = True
        else:
            cases.append(Case("%s:%s" % (task.name, line["name"]), line["outcome"], line["output"]))
    if not finished:
        cases.append(Case("%s:%s" % (task.name, started), "failed", output + "\n" + ended(task, code)))
    return cases


# ---- the tasks -----------------------------------------------------------------------


def build_dir(preset):
    return BUILD if preset == "release" else os.path.join(BUILD, preset)


def use_ccache():
    """
    What was compiled before is not compiled again, also in another checkout: names of files are compared as they are below
    ROOT, and a debugger may be told the folder of the earlier one.  Of CUDA files it must not compare what comes out of the
    preprocessor: that is what the host's half of them is, and not what a GPU's is.
    """
    if shutil.which("ccache"):
        for name, value in (("CMAKE_C_COMPILER_LAUNCHER", "ccache"), ("CMAKE_CXX_COMPILER_LAUNCHER", "ccache"),
                            ("CMAKE_CUDA_COMPILER_LAUNCHER", "env;CCACHE_DEPEND=1;ccache"),
                            ("CCACHE_BASEDIR", ROOT), ("CCACHE_NOHASHDIR", "1")):
            os.environ.setdefault(name, value)


def build_tasks(preset):
    """Configure and build, in this order."""
    configure = ["cmake", "--preset", preset, "-DEP_TESTS=ON", "-DEP_WERROR=ON"]
    compile_ = ["cmake", "--build", "--preset", preset, "-j", str(JOBS)]
    return [Task("build/%s-configure" % preset, configure, BUILD_S, parse=parse_build),
            Task("build/%s" % preset, compile_, BUILD_S, parse=parse_build)]


def sanitizer_env(preset):
    def options(name, text):
        path = os.path.join(TESTS, name + ".supp")
        return text + (":suppressions=" + path if os.path.exists(path) else "")

    if preset == "asan":
        return {"ASAN_OPTIONS": options("asan", "detect_leaks=1:exitcode=99:log_path=@REPORTS@"),
                "LSAN_OPTIONS": options("lsan", "print_suppressions=0"),
                "UBSAN_OPTIONS": options("ubsan", "print_stacktrace=1:halt_on_error=1:log_path=@REPORTS@")}
    if preset == "tsan":
        # gRPC, abseil and libuv are not built with tsan and lock with futexes of their own.
        return {"TSAN_OPTIONS": options("tsan", "ignore_noninstrumented_modules=1:halt_on_error=1:exitcode=66:"
                                                "second_deadlock_stack=1:print_suppressions=0:log_path=@REPORTS@")}
    return {}


def unit_tasks(preset):
    """One per tests/unit/test_*.c; commands and timeouts are ctest's, once the build is configured."""
    listed = subprocess.run(["ctest", "--test-dir", build_dir(preset), "--show-only=json-v1"],
                            capture_output=True, text=True, check=False)
    tests = json.loads(listed.stdout)["tests"] if listed.returncode == 0 else []
    known = {test["name"]: test for test in tests}
    for source in sorted(glob.glob(os.path.join(TESTS, "unit", "test_*.c"))):
        name = os.path.splitext(os.path.basename(source))[0]
        test = known.get(name, {})
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        command = test.get("command", ["sh", "-c", "echo %s is not in tests/CMakeLists.txt; false" % name])
        yield Task("%s/unit/%s" % (preset, name), command, properties.get("TIMEOUT", UNIT_S),
                   sanitizer_env(preset), parse_cmocka)


def unittest_task(name, path, preset, scale, case):
    """One file of unittest cases; case chooses some of them.  scale: how much slower than usual."""
    task = Task(name, [], FILE_S * scale, parse=parse_unittest)
    task.command = [sys.executable, "-B", os.path.join(TESTS, "run_unittest.py"), path, task.results,
                    str(CASE_S * scale), case]
    task.env = {**sanitizer_env(preset), "EP_BIN": os.path.join(build_dir(preset), "bin"),
                "EP_TIME_SCALE": str(scale), "PYTHONPATH": os.path.join(TESTS, "integration"),
                "PYTHONDONTWRITEBYTECODE": "1"}  # for the python programs that tests start
    return task


def integration_tasks(preset, case=""):
    """One per file of tests/integration and tests/faults."""
    for folder in ("integration", "faults"):
        for path in sorted(glob.glob(os.path.join(TESTS, folder, "test_*.py"))):
            name = os.path.splitext(os.path.basename(path))[0]
            yield unittest_task("%s/%s/%s" % (preset, folder, name), path, preset, TIME_SCALE[preset], case)


# Each way of the plugin with each kind of memory; the tables that NCCL has for it take turns.
GIN_RUNS = [("tcp", "host", "gin-v11"), ("tcp", "cuda", "rma-v14"),
            ("host", "host", "rma-v13"), ("host", "cuda", "gin-v11"),
            ("verbs", "host", "rma-v14"), ("verbs", "cuda", "gin-v11")]
GIN_RANKS = {"release": 4, "asan": 3, "tsan": 3}
GIN_CASE_S = 30      # times TIME_SCALE


def gin_tasks(preset):
    """tests/gin: the plugin, with GPUs that are the double's, and whether the tests find what they are for."""
    folder, scale = build_dir(preset), TIME_SCALE[preset]
    env = {**sanitizer_env(preset), "EP_CUDA_MODULE": os.path.join(folder, "unit", "libep_cuda_cpu.so"),
           "LD_LIBRARY_PATH": os.path.join(folder, "unit", "verbs"),  # a libibverbs that reorders
           "EP_GIN_MOVERS": "5",                # also where CPUs are few
           "EP_GIN_STAGING_MIB": "8",           # what they bring waits for memory
           "EP_GIN_TIMEOUT_S": str(4 + scale)}  # two cases wait for it
    for transport, memory, table in GIN_RUNS:
        yield Task("%s/gin/%s-%s" % (preset, transport, memory),
                   [os.path.join(folder, "gin", "gin_conformance"), "--memory", memory, "--table", table,
                    "--plugin", os.path.join(folder, "lib", "libnccl-net-ep.so"), "--ranks", str(GIN_RANKS[preset]),
                    "--seconds", str(GIN_CASE_S * scale)],
                   SCRIPT_S, {**env, "EP_GIN_TRANSPORT": transport}, parse_lines)
    if preset == "release":
        yield Task("release/gin/mutants", [sys.executable, "-B", os.path.join(TESTS, "gin", "mutants.py"),
                                           os.path.join(folder, "gin")], SCRIPT_S, parse=parse_lines)


SCALE_NODES = 40  # half of them are more than a server may ask at once


def scale_task():
    """Counts writes and messages of a small cluster, and looks at no times: sessions outlive a machine that stands still."""
    return Task("scale", ["sh", os.path.join(TESTS, "scale", "scale.sh"), "--nodes", str(SCALE_NODES), "--runs", "1",
                          "--ttl-ms", "20000", "--check"], SCRIPT_S)


def fuzz_tasks():
    for source in sorted(glob.glob(os.path.join(TESTS, "fuzz", "fuzz_*.c"))):
        name = os.path.splitext(os.path.basename(source))[0]
        corpus = os.path.join(BUILD, "fuzz-corpus", name)  # grows from run to run
        seeds = os.path.join(TESTS, "fuzz", "corpus", name)
        os.makedirs(corpus, exist_ok=True)
        yield Task("fuzz/" + name,
                   [os.path.join(BUILD, "fuzz", "fuzz", name), "-max_total_time=%d" % FUZZ_S, "-timeout=10",
                    "-rss_limit_mb=2048", "-print_final_stats=1", "-artifact_prefix=%s/%s-" % (LOGS, name),
                    corpus] + ([seeds] if os.path.isdir(seeds) else []),
                   FUZZ_S + 60, {"UBSAN_OPTIONS": "print_stacktrace=1"})


def valgrind_task(case):
    return unittest_task("valgrind", os.path.join(TESTS, "valgrind.py"), "release", VALGRIND_SCALE, case)


def script_tasks():
    """They build and install in build/."""
    yield Task("bundle", ["bash", os.path.join(TESTS, "bundle.sh")], SCRIPT_S)
    yield Task("install", ["bash", os.path.join(TESTS, "install.sh")], SCRIPT_S)
    yield Task("quickstart", ["bash", os.path.join(ROOT, "deploy", "quickstart.sh")], SCRIPT_S)


def faults_tasks():
    """They say how soon a loss is known and all is well again, and for how long traffic pauses."""
    def script(name, *flags, called=None):
        return Task("faults/" + (called or name), ["sh", os.path.join(TESTS, "faults", name + ".sh"), *flags], SCRIPT_S)

    yield script("soak", "--seed", "1", "--seconds", str(FAULTS_S))
    yield script("soak", "--seed", "2", "--seconds", str(HT_FAULTS_S), "--mode", "ht", called="soak-ht")
    yield script("reconfigure", "--seed", "1", "--changes", str(CHANGES))
    yield script("detect", "--times", "1")


# The kernels on CPUs: name, ranks, nodes, cases.
KERNEL_RUNS = (
    ("", "2", "1", "T=33"),
    # Of two handles, and of both modes in one group, in turns; too many rows for the worker's memory; HT flat, with a bias too.
    ("-orders", "2", "1", "interleaved"),
    ("-behind", "3", "1", "others dispatch"),
    ("-skipped", "2", "1", "skipped combines"),
    ("-released", "3", "1", "released handles"),
    ("-handles", "2", "1", "handles that hold"),
    ("-groups", "2", "1", "of one group while another"),
    ("-overflow", "2", "1", "rows do not fit"),
    ("-flat", "2", "1", "HT flat bf16 T=77"),
    # LL: choices, weights and experts of all kinds, and a bias.
    ("-expert-major", "2", "1", "expert-major bf16 T=77"),
    # Both modes: results, of those that stay, of ops that a rank leaves.
    ("-members", "3", "1", "a rank leaves"),
    # LL: some blocks of a rank have begun without the one that joins.
    ("-joins", "3", "1", "somebody joins in"),
    # What a rank that is late makes others wait for: its dispatch, its credit, its combine.
    ("-late-rank", "2", "1", "a rank's"),
    # Both modes, with the ranks on several nodes: formats and layouts; ranks that are absent, leave and join; more ranks than
    # a warp has lanes.
    ("-of-nodes", "4", "2", "T=33"),
    ("-of-nodes-members", "4", "2", "a rank "),
    ("-of-nodes-behind", "4", "2", "others dispatch"),
    ("-of-nodes-overflow", "4", "2", "rows do not fit"),
    ("-of-nodes-uneven", "5", "2", "HT packed bf16 T=77"),
    # Of three ranks of a node two are absent.
    ("-of-nodes-gates", "6", "2", "ranks of a node"),
    ("-of-nodes-late-rank", "2", "2", "a rank's"),
    # Between ops, which are held for it.
    ("-of-nodes-joins", "3", "2", "somebody joins while"),
    ("-of-nodes-many", "40", "5", "T=1 "),
    ("-of-nodes-alone", "35", "35", "packed bf16 T=1 "),
)
# Of ops that a rank is late for: all others are to be done within an eighth of it, where kernels have no time that they keep.
LATE_RANK_MS = "4000"
# Half a minute each.
LONG_KERNEL_RUNS = (
    ("-of-nodes-orders", "4", "2", "interleaved"),
    ("-of-nodes-uneven-flat", "5", "2", "HT flat bf16 T=77"),
    ("-of-nodes-uneven-fp8", "5", "2", " fp8 T=33"),
    ("-of-nodes-uneven-gates", "7", "2", "ranks of a node"),
    # Nodes of three ranks, and of two and three.
    ("-of-nodes-absent", "6", "2", "a rank is absent"),
    ("-of-nodes-leaves", "6", "2", "a rank leaves while"),
    ("-of-nodes-uneven-leaves-amid", "5", "2", "HT: a rank leaves in the middle of a dispatch, packed"),
)
# Executor server.  By turns ranks ring by their streams, by kernels that wait, and have a warp look for the doorbell.
SERVED_KERNEL_RUNS = (
    ("", "2", "1", "T=33"),
    # Many ops alike, for which entries are told what to expect, and then others; ops that are none, and that change meanwhile.
    ("-ops", "2", "1", "ops that "),
    ("-memory", "2", "1", "memory "),
    ("-closed", "2", "1", "a mailbox that is closed"),
    ("-end", "2", "1", "the end of a serve"),
    ("-forged", "2", "1", "a forged window"),
    ("-orders", "2", "1", "interleaved"),
    ("-halves", "2", "1", "in halves"),
    ("-handles", "2", "1", "handles that hold"),
    ("-overflow", "2", "1", "rows do not fit"),
    ("-behind", "3", "1", "others dispatch"),
    ("-absent", "3", "1", "a rank is absent"),
    ("-of-nodes", "4", "2", "packed bf16 T=33"),
)
# Twice such as repeat themselves, and others before them: this seed has both modes among them.
SERVED_KERNEL_SOAK_OPS = "300"
# Random ops.  This seed has rank 0 away in the middle; of the four on two nodes it has it away from the beginning, then all of
# its node, then they are back, and for the last hundred ops it is away again.
KERNEL_SOAK_SEED, KERNEL_SOAK_OPS = "22", "900"
KERNEL_SOAKS = (("-soak", "3", "1"), ("-soak-ht", "3", "1", "--ht"),
                ("-of-nodes-soak", "4", "2"), ("-of-nodes-soak-ht", "4", "2", "--ht"))
# What goes between nodes takes up to so many ms, and often; signals overtake each other by as much.
LATE_MS, KERNEL_LATE_OPS = "20", "300"
KERNEL_LATE_SOAKS = (("-of-nodes-late",), ("-of-nodes-late-ht", "--ht"))


def gpu_tasks(quick):
    """tests/gpu: as they are, which needs GPUs, and with modules that run on CPUs."""
    def script(name, *flags):
        return ["bash", os.path.join(TESTS, "gpu", name + ".sh"), *flags]

    yield Task("gpu/run", script("run", "--quick", "--verbose"), GPU_S, parse=parse_lines)
    yield Task("gpu/bench", script("bench"), GPU_S, parse=parse_lines)
    yield Task("gpu/sanitize", script("sanitize"), GPU_S, parse=parse_lines)
    def on_cpus(module):
        return {"EP_CUDA_MODULE": os.path.join(BUILD, "unit", "libep_cuda_%s.so" % module)}

    def kernels(name, ranks, nodes, *flags, **more):
        wait_ms, env = ("120000", {"EP_CUDA_WIRE_NODES": nodes, **more}) if nodes != "1" else ("60000", {})
        return Task("gpu/kernels-on-cpus" + name,
                    [os.path.join(BUILD, "gpu", "ll_device"), "--ranks", ranks, "--timeout-ms", wait_ms,
                     "--late-ms", LATE_RANK_MS, *flags],
                    COMPUTE_S, {**on_cpus("kernels"), **env}, parse_lines, computes=True)

    for name, ranks, nodes, cases in KERNEL_RUNS + (() if quick else LONG_KERNEL_RUNS):
        yield kernels(name, ranks, nodes, "--filter", cases)
    for name, ranks, nodes, cases in SERVED_KERNEL_RUNS:
        yield kernels("-served" + name, ranks, nodes, "--executor", "server", "--filter", cases)
    for name, ranks, nodes, *flags in () if quick else KERNEL_SOAKS:
        yield kernels("-served" + name, ranks, nodes, "--executor", "server", "--seed", KERNEL_SOAK_SEED, "--soak",
                      SERVED_KERNEL_SOAK_OPS, *flags)
    for name, ranks, nodes, *flags in () if quick else KERNEL_SOAKS:
        yield kernels(name, ranks, nodes, "--seed", KERNEL_SOAK_SEED, "--soak", KERNEL_SOAK_OPS, *flags)
    for name, *flags in () if quick else KERNEL_LATE_SOAKS:
        yield kernels(name, "4", "2", "--seed", KERNEL_SOAK_SEED, "--soak", KERNEL_LATE_OPS, *flags,
                      EP_CUDA_WIRE_LATE_MS=LATE_MS)
    yield Task("gpu/product-on-cpus",
               script("product", "--gpus", "2", "--quick", *(["--filter", "of the server"] if quick else [])),
               GPU_S, on_cpus("cpu"), parse_lines)


def model_task(case=""):
    """case chooses some, as the script's argument does."""
    return Task("model", [sys.executable, "-B", os.path.join(TESTS, "model", "run.py"), *([case] if case else [])],
                COMPUTE_S, parse=parse_lines, computes=True)


def pool_tasks(preset, quick, case):
    """Of one build."""
    if preset == "fuzz":
        yield from fuzz_tasks()
        return
    yield from integration_tasks(preset, case)
    yield from gin_tasks(preset)
    yield from unit_tasks(preset)
    if preset == "release":
        yield archs_task()
        yield from gpu_tasks(quick)
        yield scale_task()
        if not quick:
            yield valgrind_task(case)


def archs_task():
    """libep_cuda.so of the release build."""
    return Task("cuda/archs", [sys.executable, "-B", os.path.join(TESTS, "cuda_archs.py"), BUILD], SCRIPT_S, parse=parse_lines)


def layers_task():
    return Task("layers", [sys.executable, "-B", os.path.join(TESTS, "check_layers.py")], SCRIPT_S)


# ---- all of it -----------------------------------------------------------------------


def mixed(builds):
    """Tasks of each build in turn, as those of sanitizers take more of the cores.  The longest first, as their limits tell."""
    by_length = [sorted(tasks, key=lambda task: -task.timeout_s) for tasks in builds]
    return [task for turn in itertools.zip_longest(*by_length) for task in turn if task]


class Run:
    """Chooses tasks, runs them and gathers their cases."""

    def __init__(self, only, base):
        self.only, _, self.only_case = only.partition(":")
        self.base = base
        self.cases = []
        self.stopped = False

    def stop(self, number, _frame):
        """SIGINT, SIGTERM: ends what runs now and lets nothing else begin."""
        self.stopped = True
        kill_marked(RUN_ID)
        sys.exit(128 + number)

    def chosen(self, tasks):
        return [task for task in tasks if self.only in task.name]

    def run(self, tasks, jobs=JOBS):
        """Runs the tasks, jobs at a time.  False when one failed."""
        good = True
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(self.run_one, task): task for task in tasks}
            for future in concurrent.futures.as_completed(running):
                good = future.result() and good
        return good

    def run_one(self, task):
        if self.stopped:
            return False
        cases, seconds = run_task(task, self.base)
        self.cases += cases
        print("%-44s %6.1f s  %s" % (task.name, seconds, summary(cases)), flush=True)
        return not any(c.outcome == "failed" for c in cases)

    def build(self, preset):
        return all(self.run([task]) for task in build_tasks(preset))

    def pool(self, presets, quick):
        """
        What can run beside anything else, of all builds at once: no core waits at the end of each.  Tests wait for leases and
        elections, so there is one more at a time than there are cores.  What only computes has what they leave of these.
        """
        builds = []
        for preset in presets:
            if self.chosen(pool_tasks(preset, quick, self.only_case)) and self.build(preset):
                builds.append(self.chosen(pool_tasks(preset, quick, self.only_case)))  # unit tests have commands now
        if not quick:
            builds.append(self.chosen([model_task(self.only_case)]))
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            computing = beside.submit(self.run, [task for tasks in builds for task in tasks if task.computes])
            self.run(mixed([[task for task in tasks if not task.computes] for tasks in builds]), JOBS + 1)
            computing.result()

    def alone(self, tasks):
        """What wants all of the machine, or changes build/."""
        tasks = self.chosen(tasks)
        if tasks and self.build("release"):
            self.run(tasks, jobs=1)


def summary(cases):
    count = {o: sum(c.outcome == o for c in cases) for o in ("passed", "failed", "skipped")}
    return ", ".join("%d %s" % (n, o) for o, n in count.items() if n or o != "skipped")


def files_around():
    """Where a run must not add anything: the tree outside build/, and where servers put things."""
    found = set()
    for folder, names, files in os.walk(ROOT):
        if folder == ROOT:
            names[:] = [n for n in names if n not in (".git", "build")]
        found.update(os.path.join(folder, f) for f in files)
    for pattern in ("/dev/shm/ep*", "/run/ep-server*", "/var/lib/ep-server*"):
        found.update(glob.glob(pattern))
    return found


def print_results(cases):
    """Failures last, as what keeps only the end of a long log is to have them."""
    for case in cases:
        if case.outcome == "skipped":
            print("skipped %s: %s" % (case.name, (case.output.strip().splitlines() or [""])[-1]))
    for case in cases:
        if case.outcome == "failed":
            lines = case.output.rstrip().splitlines()
            print("\n---- FAILED %s" % case.name)
            if len(lines) > SHOWN_LINES:
                print("(the last %d of %d lines; all are in build/test-logs/)" % (SHOWN_LINES, len(lines)))
            print("\n".join(lines[-SHOWN_LINES:]))


def main():
    parser = argparse.ArgumentParser(prog="tests/run.sh", description="Runs every test of ep-server.")
    parser.add_argument("--quick", action="store_true",
                        help="release build, unit and integration tests only")
    parser.add_argument("--only", metavar="PATTERN", default="",
                        help="only tasks with PATTERN in their name (asan, unit/test_rpc, fuzz, quickstart); "
                             "TASK:CASE also chooses a case of an integration test or of model")
    options = parser.parse_args()

    began = time.monotonic()
    use_ccache()
    shutil.rmtree(LOGS, ignore_errors=True)
    os.makedirs(LOGS)
    before = files_around()
    base = temporary_directory("/tmp", "ept-")
    run = Run(options.only, base)
    signal.signal(signal.SIGINT, run.stop)
    signal.signal(signal.SIGTERM, run.stop)
    try:
        run.run(run.chosen([layers_task()]))
        run.pool(["release"] if options.quick else ["release", "asan", "tsan", "fuzz"], options.quick)
        if not options.quick:
            run.alone([*script_tasks(), *faults_tasks()])
    finally:
        shutil.rmtree(base, ignore_errors=True)

    ran = len(run.cases)
    new = sorted(files_around() - before)
    if new:
        run.cases.append(Case("leftovers", "failed", "new files outside build/:\n" + "\n".join(new)))
    print_results(run.cases)
    print("took %d s" % (time.monotonic() - began))
    print(summary(run.cases))
    sys.exit(0 if ran and "failed" not in {c.outcome for c in run.cases} else 1)


if __name__ == "__main__":
    main()
