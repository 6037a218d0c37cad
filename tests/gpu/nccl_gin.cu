#include "nccl_gin.h"

#include <nccl_device.h>

namespace {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kLooks = 64; /* at a signal, between two looks at the clock */
constexpr uint32_t kAlign = 64; /* of messages in an area */

__device__ constexpr uint32_t kSizes[] = { GIN_SIZES };
constexpr uint32_t kMessages = sizeof kSizes / sizeof *kSizes;

/* Signals, by the rank that raises them. */
enum { kData = 0, kTaken = GIN_MAX_RANKS, kPing = 2 * GIN_MAX_RANKS, kPoured = 3 * GIN_MAX_RANKS,
       kDrained = 4 * GIN_MAX_RANKS, kSignals = 5 * GIN_MAX_RANKS };

struct Rank {
    ncclDevComm comm;
    ncclWindow_t window;
    uint8_t *base;
    uint32_t rank, ranks;
    uint64_t limit_ns;
    gin_report *report;
};
static_assert(sizeof(ncclDevComm) <= sizeof(gin_device), "gin_device is too small for this NCCL");

__device__ uint64_t now_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ uint64_t area_to(uint32_t rank) { return rank * GIN_AREA; }
__device__ uint64_t area_from(const Rank &r, uint32_t rank) { return (r.ranks + rank) * GIN_AREA; }

/* What word i of what `source` sends to `target` is, in a round. */
__device__ uint32_t word_of(uint32_t source, uint32_t target, uint64_t round, uint32_t i)
{
    uint32_t x = i * 0x9e3779b1u + source * 0x85ebca77u + target * 0xc2b2ae3du + (uint32_t)round * 0x27d4eb2fu;

    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    return x ^ x >> 12;
}

/* One thread: until `source` has raised its signal that far; false when it has not within the limit. */
__device__ bool wait_signal(const Rank &r, const ncclGin &gin, uint32_t kind, uint32_t source, uint64_t least)
{
    const uint64_t until = now_ns() + r.limit_ns;

    for (uint32_t looks = 1; gin.readSignal(kind + source) < least; looks++)
        if (looks % kLooks == 0 && now_ns() > until) {
            r.report->late = 1;
            r.report->late_rank = source;
            return false;
        }
    return true;
}

/* All threads: did everybody's wait end well? */
__device__ bool all_good(bool good)
{
    return __syncthreads_and(good);
}

/* ---- exchange ------------------------------------------------------------------------------ */

__device__ uint32_t place_of(uint32_t message)
{
    uint32_t at = 0;

    for (uint32_t m = 0; m < message; m++)
        at += (kSizes[m] + kAlign - 1) / kAlign * kAlign;
    return at;
}

__device__ void write_messages(const Rank &r, uint64_t round)
{
    for (uint32_t target = 0; target < r.ranks; target++)
        for (uint32_t m = 0; m < kMessages; m++) {
            uint32_t *to = (uint32_t *)(r.base + area_to(target) + place_of(m));
            const uint32_t first = place_of(m) / 4;

            for (uint32_t i = threadIdx.x; i < kSizes[m] / 4; i += kThreads)
                to[i] = word_of(r.rank, target, round, first + i);
        }
}

/* One thread: all messages, and the signal with the last one. */
__device__ void put_messages(const Rank &r, const ncclGin &gin, uint32_t target)
{
    const ncclTeam world = ncclTeamWorld(r.comm);

    for (uint32_t m = 0; m < kMessages; m++) {
        const uint64_t from = area_to(target) + place_of(m), to = area_from(r, r.rank) + place_of(m);

        if (m + 1 < kMessages)
            gin.put(world, (int)target, r.window, to, r.window, from, kSizes[m]);
        else
            gin.put(world, (int)target, r.window, to, r.window, from, kSizes[m],
                    ncclGin_SignalAdd{ kData + r.rank, 1 });
    }
}

__device__ void check_messages(const Rank &r, uint64_t round)
{
    for (uint32_t source = 0; source < r.ranks; source++)
        for (uint32_t m = 0; m < kMessages; m++) {
            const uint32_t *from = (const uint32_t *)(r.base + area_from(r, source) + place_of(m));
            const uint32_t first = place_of(m) / 4;

            for (uint32_t i = threadIdx.x; i < kSizes[m] / 4; i += kThreads) {
                const uint32_t got = __ldcg(from + i), want = word_of(source, r.rank, round, first + i);

                if (got == want || atomicAdd((unsigned long long *)&r.report->wrong, 1ull))
                    continue;
                r.report->got = got;
                r.report->want = want;
                r.report->source = source;
                r.report->word = first + i;
            }
        }
}

__global__ void __launch_bounds__(kThreads) exchange(const __grid_constant__ Rank r, uint64_t before, uint32_t rounds)
{
    const ncclGin gin{ r.comm, 0 };
    const uint32_t peer = threadIdx.x; /* of the thread, if there is such a rank */
    const bool has_peer = peer < r.ranks;

    for (uint64_t round = before; round < before + rounds; round++) {
        write_messages(r, round);
        __threadfence_system(); /* what is put is read by others than this GPU */
        __syncthreads();
        if (has_peer)
            put_messages(r, gin, peer);
        if (!all_good(!has_peer || wait_signal(r, gin, kData, peer, round + 1)))
            return;
        check_messages(r, round);
        __syncthreads();
        if (has_peer)
            gin.signal(ncclTeamWorld(r.comm), (int)peer, ncclGin_SignalAdd{ kTaken + r.rank, 1 });
        if (!all_good(!has_peer || wait_signal(r, gin, kTaken, peer, round + 1)))
            return;
        if (threadIdx.x == 0)
            r.report->rounds++;
    }
}

/* ---- times ----------------------------------------------------------------------------------- */

__device__ void note_time(const Rank &r, uint32_t round, uint64_t start)
{
    if (round < GIN_MAX_TIMES)
        r.report->ns[round] = now_ns() - start;
    r.report->rounds++;
}

__global__ void ping_pong(const __grid_constant__ Rank r, uint32_t peer, bool first, uint64_t before, uint32_t rounds)
{
    const ncclGin gin{ r.comm, 0 };
    const auto put = [&] {
        gin.put(ncclTeamWorld(r.comm), (int)peer, r.window, area_from(r, r.rank), r.window, area_to(peer), 16,
                ncclGin_SignalAdd{ kPing + r.rank, 1 });
    };

    for (uint32_t round = 0; round < rounds; round++) {
        const uint64_t start = now_ns();

        if (first)
            put();
        if (!wait_signal(r, gin, kPing, peer, before + round + 1))
            return;
        if (!first)
            put();
        note_time(r, round, start);
    }
}

/* One thread for each peer. */
__device__ void pour_to(const Rank &r, const ncclGin &gin, uint32_t peer, uint32_t puts, uint32_t bytes)
{
    const ncclTeam world = ncclTeamWorld(r.comm);
    const uint32_t places = (uint32_t)(GIN_AREA / bytes);

    for (uint32_t i = 0; i < puts; i++) {
        const uint64_t at = (uint64_t)(i % places) * bytes;

        if (i + 1 < puts)
            gin.put(world, (int)peer, r.window, area_from(r, r.rank) + at, r.window, area_to(peer) + at, bytes);
        else
            gin.put(world, (int)peer, r.window, area_from(r, r.rank) + at, r.window, area_to(peer) + at, bytes,
                    ncclGin_SignalAdd{ kPoured + r.rank, 1 });
    }
}

__global__ void pour(const __grid_constant__ Rank r, uint32_t to, uint32_t from, uint32_t puts, uint32_t bytes,
                     uint64_t before, uint32_t rounds)
{
    const ncclGin gin{ r.comm, 0 };
    const uint32_t peer = threadIdx.x;
    const bool sends = to >> peer & 1, takes = from >> peer & 1;

    for (uint32_t round = 0; round < rounds; round++) {
        const uint64_t start = now_ns(), count = before + round + 1;

        if (sends)
            pour_to(r, gin, peer, puts, bytes);
        bool good = !takes || wait_signal(r, gin, kPoured, peer, count);

        if (takes && good)
            gin.signal(ncclTeamWorld(r.comm), (int)peer, ncclGin_SignalAdd{ kDrained + r.rank, 1 });
        good = good && (!sends || wait_signal(r, gin, kDrained, peer, count));
        if (!all_good(good))
            return;
        if (threadIdx.x == 0)
            note_time(r, round, start);
    }
}

/* ---- host -------------------------------------------------------------------------------------- */

Rank rank_of(const gin_rank *rank)
{
    Rank r = {};

    memcpy(&r.comm, &rank->device, sizeof r.comm);
    r.window = rank->window;
    r.base = rank->base;
    r.rank = rank->rank;
    r.ranks = rank->ranks;
    r.limit_ns = rank->limit_ns;
    r.report = rank->report;
    return r;
}

const char *said(cudaError_t error)
{
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class... Parameters, class... Arguments>
const char *launch(void (*kernel)(Parameters...), uint32_t threads, const gin_rank *rank, Arguments... arguments)
{
    kernel<<<1, threads, 0, static_cast<cudaStream_t>(rank->stream)>>>(rank_of(rank), arguments...);
    return said(cudaGetLastError());
}

} // namespace

const char *gin_use_device(uint32_t device)
{
    return said(cudaSetDevice(static_cast<int>(device)));
}

const char *gin_device_open(void *create, ncclComm_t comm, uint32_t ranks, gin_device *out, uint32_t *lsa)
{
    const auto make = reinterpret_cast<decltype(&ncclDevCommCreate)>(create);
    ncclDevCommRequirements needs = {};
    ncclDevComm made = {};

    needs.ginForceEnable = true;
    needs.ginContextCount = 1;
    needs.ginSignalCount = kSignals;
    if (ranks > GIN_MAX_RANKS)
        return "too many ranks for these signals";
    if (make(comm, &needs, &made) != ncclSuccess)
        return "ncclDevCommCreate() failed";
    *out = {};
    memcpy(out, &made, sizeof made);
    *lsa = static_cast<uint32_t>(ncclTeamLsa(made).nRanks);
    return made.ginContextCount > 0 ? nullptr : "the device communicator has no GIN context";
}

const char *gin_device_close(void *destroy, ncclComm_t comm, const gin_device *device)
{
    const auto end = reinterpret_cast<decltype(&ncclDevCommDestroy)>(destroy);
    ncclDevComm made = {};

    memcpy(&made, device, sizeof made);
    return end(comm, &made) == ncclSuccess ? nullptr : "ncclDevCommDestroy() failed";
}

const char *gin_exchange(const gin_rank *rank, uint64_t before, uint32_t rounds)
{
    return launch(exchange, kThreads, rank, before, rounds);
}

const char *gin_ping_pong(const gin_rank *rank, uint32_t peer, bool first, uint64_t before, uint32_t rounds)
{
    return launch(ping_pong, 1, rank, peer, first, before, rounds);
}

const char *gin_pour(const gin_rank *rank, uint32_t to, uint32_t from, uint32_t puts, uint32_t bytes, uint64_t before,
                     uint32_t rounds)
{
    return launch(pour, GIN_MAX_RANKS, rank, to, from, puts, bytes, before, rounds);
}
