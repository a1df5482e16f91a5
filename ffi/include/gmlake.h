// libgmlake.so: GPU memory that does not fragment, for C and for torch's pluggable allocator.
// Written by cbindgen from the crate glake-ffi. What is promised stands in docs/SEMANTICS.md.
//
// Every glake_* function that can fail returns a status; the text is glake_last_error()'s, of the calling thread.
// All functions may be called from any thread. Nothing starts before the first call that needs a device.

#ifndef GLAKE_GMLAKE_H
#define GLAKE_GMLAKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <functional>
#include <utility>
struct CUstream_st;
extern "C" {
#endif

// Done.
#define GLAKE_OK 0

// Not enough memory, after everything that may be taken back was: ask for less, free something, raise the limit.
#define GLAKE_OUT_OF_MEMORY 1

// An argument is wrong, or names no device, block or pool; nothing was changed.
#define GLAKE_INVALID 2

// The driver refused, or GLake itself failed.
#define GLAKE_DRIVER 3

// Nothing is served: no driver, a bad configuration, a second copy of the library, a forked child, the end of the process.
#define GLAKE_UNAVAILABLE 4

// Not possible here.
#define GLAKE_UNSUPPORTED 5

// Not now: memory is in use that was to leave, or is evicted and was to be used, or a hook refused: the call moved nothing. Or time was
// over: what was to come back goes on coming.
#define GLAKE_CLOSED 6

// A use that begins while its memory is evicted brings it back, and waits for that.
#define GLAKE_WHEN_CLOSED_REFILL 0

// It waits until somebody brings it back.
#define GLAKE_WHEN_CLOSED_HOLD 1

// It is refused: `GLAKE_CLOSED`.
#define GLAKE_WHEN_CLOSED_REFUSE 2

// A region's bytes are copied when it leaves, and copied back.
#define GLAKE_POLICY_KEEP 0

// As `GLAKE_POLICY_KEEP`, and the region can be sealed: nobody writes to its bytes then.
#define GLAKE_POLICY_SEALED 1

// Its bytes are given up: after a refill its blocks have their addresses, and any bytes.
#define GLAKE_POLICY_DISCARD 2

// The copy goes when the bytes are back.
#define GLAKE_HOST_COPY_DROP 0

// The copy of a sealed region stays: it leaves without copying the next time.
#define GLAKE_HOST_COPY_RETAIN 1

// As `GLAKE_HOST_COPY_DROP`, and host memory for it is pinned ahead: by `glake_region_prepare`, and in the background once no use runs.
#define GLAKE_HOST_COPY_PREPARE 2

// Beside one of these: the bytes are copied to the host while nobody uses them, and stay; what did not change then leaves at once.
#define GLAKE_HOST_COPY_CLEAN 16

// No lease: nothing but the limit bounds a pool.
#define GLAKE_LEASE_NONE UINT64_MAX

// Memory is to come back: so much more has to be granted for it, and for the growth after it.
#define GLAKE_LEASE_WANT 0

// An allocation is so much above the lease, and waits; or a commit, or a refill whose grants others took of.
#define GLAKE_LEASE_GROW 1

// A shrink gave so much back: the lease is lower by it.
#define GLAKE_LEASE_RETURNED 2

// Somebody still waits for a grant. Told again and again meanwhile, on the thread that waits: a watcher may let others run.
#define GLAKE_LEASE_WAITING 3

// A copy of the usual priority.
#define GLAKE_COPY_NORMAL 0

// A copy that background ones make way for.
#define GLAKE_COPY_CRITICAL 1

// A copy that makes way: few bytes of it are in flight at a time.
#define GLAKE_COPY_BACKGROUND 2

// The call returns when the bytes are there.
#define GLAKE_COPY_BLOCKING 16

// With `GLAKE_COPY_BLOCKING`: both sides are read and compared, whatever way the copy went; what differs is copied again by the driver, and
// an error where it differs still.
#define GLAKE_COPY_VERIFY 32

// Stream 0 is the calling thread's own default stream, not the legacy one.
#define GLAKE_COPY_PTDS 64

// Over the GPU's own link alone, as the driver makes it.
#define GLAKE_COPY_DIRECT 128

// Of `glake_copy_try` alone: the copy is one from host memory to a GPU's, or none for it. Not with `GLAKE_COPY_FROM_GPU`.
#define GLAKE_COPY_TO_GPU 256

// Of `glake_copy_try` alone: the copy is one from a GPU's memory to host memory, or none for it. Not with `GLAKE_COPY_TO_GPU`.
#define GLAKE_COPY_FROM_GPU 512

// Times a device's number and one: streams 0, 1 and 2 are that device's default ones, not those of the calling thread's current device.
#define GLAKE_COPY_DEVICE 65536

// Which blocks of a private pool were live at some time; the library's alone to look into.
typedef struct glake_checkpoint glake_checkpoint;

// A live block.
typedef struct {
    // Where it begins.
    void *base;
    // How long it is: the request rounded up to 512 bytes.
    uint64_t size;
    // What was asked for.
    uint64_t requested;
    // Whose memory it is.
    int32_t device;
} glake_block;

// Told of leases: an event of `GLAKE_LEASE_WANT` and its kin, the device, and how many bytes.
typedef void (*LeaseWatcher)(void *context, int32_t event, int32_t device, uint64_t bytes);

// Bytes of a block, counted from its start.
typedef struct {
    // The first.
    uint64_t start;
    // The one behind the last.
    uint64_t end;
} glake_byte_range;

// Given to who says which bytes of a block count, who calls it for each range of bytes that counts, from the first to the one behind the last.
typedef void (*glake_live_range_add)(void *into, uint64_t start, uint64_t end);

// Says which bytes of a block count: calls `add` for each range, with `into`, and answers 0.
typedef int32_t (*glake_live_callback_function)(void *context, glake_live_range_add add, void *into);

// Called once when a context is no longer needed.
typedef void (*glake_context_drop)(void *context);

// Told of a request that is about to be refused: the device's memory, and what nobody holds of it.
typedef void (*glake_out_of_memory_observer)(void *context,
                                             int32_t device,
                                             uint64_t requested,
                                             uint64_t total,
                                             uint64_t free);

// Told of memory that was mapped for blocks, or is about to be unmapped.
typedef void (*glake_mapping_observer)(void *context,
                                       int32_t device,
                                       bool mapped,
                                       uint64_t address,
                                       uint64_t size);

// Says whether allocations on a stream go to a pool; called on the thread that allocates.
typedef bool (*glake_stream_filter)(void *context, void *stream);

// Called for each block.
typedef void (*glake_block_visit)(void *context, void *pointer, uint64_t size);

// Called for each block that is freed.
typedef void (*glake_block_freed)(void *context, void *pointer);

// Called before memory leaves or comes back, and after, with the event as JSON; answers 0 where all is well.
typedef int32_t (*glake_hook)(void *context, const char *event_json);

// Bytes that a pass saves.
typedef struct {
    // How many they are.
    uint64_t size;
    // How many of them go over a link, where fewer give back exactly the same; 0: all.
    uint64_t link_size;
    // The layer that saves them, by a number that the pass gives to one run of it; below 0: none.
    int64_t scope;
    // What they are to a leaf of that layer, which can be computed again: 1 its output; 2 saved beside the output that was told before
    // them, and not stored where that is not; 0 nothing.
    uint8_t leaf;
    // The stream that makes them.
    void *stream;
} glake_pack;

// A mapped range of addresses.
typedef struct {
    // Where it begins.
    uint64_t address;
    // How long it is.
    uint64_t size;
    // The stream of its first block that belongs to one.
    void *stream;
    // The private pool that it belongs to; 0 and 0: none.
    uint64_t pool_first;
    // The second number of that pool.
    uint64_t pool_second;
    // Whose memory it is.
    int32_t device;
    // Whether it holds requests above 1 MiB.
    bool large;
    // A second view of memory that other segments count: it reserves nothing.
    bool stitched;
} glake_segment;

// Called for each segment.
typedef void (*glake_segment_visit)(void *context, const glake_segment *segment);

// A part of a segment.
typedef struct {
    // Where it begins.
    uint64_t address;
    // How long it is.
    uint64_t size;
    // What was asked for; 0 where it is free.
    uint64_t requested;
    // Handed out.
    bool live;
    // Freed, and still in use by other streams.
    bool pending;
} glake_segment_block;

// Called for each part of the segment before it, in order.
typedef void (*glake_segment_block_visit)(void *context, const glake_segment_block *block);

// One statistic.
typedef struct {
    // Now.
    int64_t current;
    // The most since the peaks were reset.
    int64_t peak;
    // All that was ever added.
    int64_t allocated;
    // All that was ever taken away.
    int64_t freed;
} glake_stat;

// Those of requests up to 1 MiB, of larger ones, or of both.
typedef struct {
    // Allocated blocks.
    glake_stat allocation;
    // Extents at home, the unit in which physical memory is created and released.
    glake_stat segment;
    // Blocks that are allocated, or freed and still in use by other streams.
    glake_stat active;
    // Free ranges that share an extent with memory in use; peak and totals repeat the current value.
    glake_stat inactive_split;
    // Bytes of allocated blocks, rounded up.
    glake_stat allocated_bytes;
    // Physical memory held by the pool.
    glake_stat reserved_bytes;
    // Bytes of active blocks.
    glake_stat active_bytes;
    // Bytes of free ranges that share an extent with memory in use.
    glake_stat inactive_split_bytes;
    // Bytes of allocated blocks as requested.
    glake_stat requested_bytes;
} glake_pool_stats;

// Everything that is counted for a device.
typedef struct {
    // Both pools.
    glake_pool_stats all;
    // Requests up to 1 MiB.
    glake_pool_stats small_pool;
    // Larger requests.
    glake_pool_stats large_pool;
    // Requests that had to reclaim memory first.
    int64_t num_alloc_retries;
    // Requests that failed for lack of memory.
    int64_t num_ooms;
    // Waits for all freed memory.
    int64_t num_sync_all_streams;
    // Extents created so far.
    int64_t num_device_alloc;
    // Extents released so far.
    int64_t num_device_free;
    // Aliases created so far.
    uint64_t stitches;
    // Allocations served by an existing alias.
    uint64_t alias_reuses;
    // Extents mapped so far, at home and in aliases.
    uint64_t extent_maps;
    // Waits of one stream for another that the program did not request.
    uint64_t stream_waits;
    // Completion edges added because bytes changed their address.
    uint64_t edges;
    // Extents mapped at present.
    uint64_t mappings;
    // Address space of aliases at present.
    uint64_t alias_bytes;
    // Address space of idle aliases.
    uint64_t idle_alias_bytes;
    // Free reserved bytes in partly used extents.
    uint64_t waste_hard;
    // Bytes of whole free extents that are not joined.
    uint64_t waste_soft;
    // Free bytes that are pending on a stream.
    uint64_t waste_stream;
    // Misses at which the lag of the GPU behind the host was measured.
    uint64_t completion_lags;
    // Median of those lags, in microseconds.
    uint64_t completion_lag_us_p50;
    // 95th percentile of those lags, in microseconds.
    uint64_t completion_lag_us_p95;
    // Maximum of those lags, in microseconds.
    uint64_t completion_lag_us_max;
    // GPU time in the waits of `borrow = wait` and of read holds, in microseconds.
    uint64_t gpu_wait_us;
    // Size of the lease; -1 without one.
    int64_t lease_bytes;
    // Physical memory that counts towards a lease: created, or about to be.
    uint64_t made_bytes;
    // Waits for a grant, by allocations and refills.
    uint64_t lease_waits;
    // Total time of those waits, in microseconds.
    uint64_t lease_wait_us;
} glake_device_stats;

// One copy of a list.
typedef struct {
    // Where the bytes go.
    void *to;
    // Where they come from.
    const void *from;
    // How many.
    size_t size;
} glake_copy_block;

// Joins the agent whose socket `agent` names, as `name`: from then on it grants what may be made, beginning with what is made. Null for
// `agent`: the socket of `agent.socket` (`GLAKE_AGENT`), else the one of this user. Null for `name`: the program's name and its number.
// Ranks of a launcher (`RANK`, `WORLD_SIZE`) are called `name/RANK` and are given memory together. It waits for the agent's answer, 5
// seconds at most, and as long for a refusal to pass whose reason may. To join again as the same is no error. A process that holds memory
// says by it that all is loaded: from then on memory may leave between uses.
//
// `GLAKE_UNAVAILABLE`: nobody answers there who can be trusted, or it refuses this process; the text says why. `GLAKE_INVALID`: the name
// cannot be one, or this process has joined another agent, or by another name: with `GLAKE_AGENT` it does so by itself when its first pool
// starts. Nothing has changed then.
//
// # Safety
// Each is null or a text that ends with a zero.
int32_t glake_join(const char *name,
                   const char *agent);

// Whether this process joins an agent by itself, with its first pool: `agent.socket` or `GLAKE_AGENT` names one. False before the process
// has started (`glake_started`).
bool glake_joins_agent(void);

// Leaves the agent: nothing but its limits bounds this process from then on. Where none is joined, in a forked child and at the end of the
// process nothing is done.
int32_t glake_leave(void);

// Hands out a block for work on a stream of the device; any thread, whatever its current device. Size 0 gives null.
//
// `GLAKE_OUT_OF_MEMORY`: everything that may be taken back was, and every pending free was waited for.
//
// # Safety
// `stream` is null or a stream of the device; `out` is null or may be written.
int32_t glake_alloc(int32_t device,
                    size_t size,
                    void *stream,
                    void **out);

// Takes a block back; its device is found by its address. Null is no error. Its own stream may have its bytes at once,
// others when all work enqueued before has completed. In a forked child nothing is done.
//
// `GLAKE_INVALID`: no live block begins there; nothing was changed.
int32_t glake_free(void *pointer);

// The live block that an address lies in.
//
// # Safety
// `out` is null or may be written.
int32_t glake_find(const void *pointer, glake_block *out);

// Says that work of a stream, of whichever device, uses a block that was allocated for another: it is handed out again, to whomever,
// only when that work is done. Null, 1 and 2 are the default streams of the block's device and of the thread's current one.
//
// # Safety
// `stream` is null or a stream.
int32_t glake_record_stream(void *pointer,
                            void *stream);

// The largest request that could be served now, with stitching and growing.
//
// # Safety
// `bytes` is null or may be written.
int32_t glake_largest(int32_t device, uint64_t *bytes);

// Waits for pending frees (not while a capture is open), then releases free memory until at most `keep` bytes are
// reserved: on one device, or with -1 on each. `released`, where not null, gets how much went. In a forked child and at the end of
// the process nothing is done.
//
// # Safety
// `released` is null or may be written.
int32_t glake_trim(int32_t device,
                   uint64_t keep,
                   uint64_t *released);

// Changes the part of a device's memory that may be reserved, 0 to 1; before its first use too. A limit that was
// configured still holds.
int32_t glake_set_fraction(int32_t device,
                           double fraction);

// The part of a device's memory that may be reserved.
//
// # Safety
// `fraction` is null or may be written.
int32_t glake_fraction(int32_t device, double *fraction);

// Gives the physical memory of `bytes` bytes from `pointer` on back to the driver, which lie in one live block: of the extents that lie
// wholly in them (of up to four times `tiers.extent` in a region, `pool.extent` outside of regions). The block keeps its addresses; the bytes are lost, and
// until `glake_commit` nothing may touch them: a kernel that does faults, `glake_copy_*` refuses. No work on them may be enqueued from this
// call on; what was enqueued before is waited for. What is fixed, or shared with other processes, stays. `decommitted`, which may be null,
// is how much memory went; it is free for others at once, and stays leased until a shrink of everything gives back what is not made.
//
// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed, or a captured graph's. Refused while a capture is open.
//
// # Safety
// `decommitted` is null or may be written.
int32_t glake_decommit(const void *pointer,
                       uint64_t bytes,
                       uint64_t *decommitted);

// Makes memory, at its addresses, for what was decommitted of `bytes` bytes from `pointer` on; the bytes have any value. What else is
// evicted of their region comes back first. `committed`, which may be null, is how much memory was made.
//
// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed. `GLAKE_OUT_OF_MEMORY`: what was made by then stays, and the same call goes on.
//
// # Safety
// `committed` is null or may be written.
int32_t glake_commit(const void *pointer,
                     uint64_t bytes,
                     uint64_t *committed);

// How many calls of the driver the library has made, on all threads and devices, and the microseconds that they took on
// the host. Either may be null.
//
// # Safety
// Both are null or may be written.
int32_t glake_driver_calls(uint64_t *calls,
                           uint64_t *microseconds);

// How many allocations on the heap the library has made.
uint64_t glake_heap_allocations(void);

// Begins a use of these regions and of all memory that lies in none; of everything where `count` is 0. Until `glake_use_end`
// nothing of that leaves: a shrink waits. Any thread may end it. Uses do not nest: one that begins under another, while a shrink
// waits for the other, waits for that shrink.
//
// `GLAKE_INVALID`: there is no region of one of these tags; the text says which are there. `GLAKE_CLOSED`: it is evicted, and
// `when_closed` says to refuse it, or `timeout_ms` (-1: none) is over. A refill that it began goes on then, and the next use finds
// it done.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros; `use` is null or may be written.
int32_t glake_use_begin(const char *const *tags,
                        size_t count,
                        uint32_t when_closed,
                        int64_t timeout_ms,
                        uint64_t *use);

// Waits until a use of these regions could begin, and begins none: no shrink waits for it. A shrink that comes before the use that
// begins next makes that one wait again.
//
// Answers as `glake_use_begin`.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros.
int32_t glake_gate_wait(const char *const *tags,
                        size_t count,
                        uint32_t when_closed,
                        int64_t timeout_ms);

// Ends a use. In a forked child and at the end of the process nothing is done.
//
// `GLAKE_INVALID`: it was ended before, or never begun.
int32_t glake_use_end(uint64_t use);

// A place between two steps of a use, where its thread needs none of its memory, and where the work that it has enqueued ends without
// it. Where a shrink waits for the use, the thread waits here until all of its memory is back; the shrink goes on once all threads of
// the use wait so, and the work of the process on its GPUs has ended. Where nobody waits it is one load. Nothing is done for a use that
// is over, in a forked child and at the end of the process. Answers whether it waited. Not under a capture.
int32_t glake_safepoint(uint64_t use);

// Whether a shrink waits for uses, or is under way: where not, no safe point has anything to do.
bool glake_safepoint_wanted(void);

// The first half of `glake_safepoint`, which waits for nothing: 1 where the thread has to wait, with `glake_safepoint_go_on` until that
// answers 1.
int32_t glake_safepoint_arrive(uint64_t use);

// The second half: waits at most `timeout_ms` (-1: as long as it takes) until all memory of the use is back. 0: it is not, and the
// thread has to ask again before it goes on.
int32_t glake_safepoint_go_on(uint64_t use,
                              int64_t timeout_ms);

// Whether a shrink waits for this use, which may be parked now: it has run for its quantum.
bool glake_use_wanted(uint64_t use);

// As `glake_safepoint_arrive`, for a thread that first has to hear others, as a rank of several: nothing of the use moves before
// `glake_vote_cast`. 1 where the thread has to wait: it asks `glake_vote_asked` until it is asked, or the shrink is over, and votes.
int32_t glake_vote_arrive(uint64_t use);

// Waits at most `timeout_ms` until a use that has arrived to vote is asked for it. 1: it is, the work of all that is parked has ended.
// 0: not yet. -1: no shrink waits for it any more.
int32_t glake_vote_asked(uint64_t use,
                         int64_t timeout_ms);

// A use that has arrived to vote says whether its memory may move: with yes, once it is asked, it does, and the thread waits with
// `glake_safepoint_go_on` until it is back. With no the thread goes on at once, the shrink is `GLAKE_CLOSED`, nothing has moved, and the
// use is not parked again for five seconds. Answers 1 where the vote is heard. 0 for a yes: the use is not asked, so
// `glake_vote_asked` tells whether the shrink is over or the vote is too early. 0 for a no: the use had agreed before, and the thread
// waits with `glake_safepoint_go_on`.
int32_t glake_vote_cast(uint64_t use,
                        bool yes);

// One more thread is inside a use: it is parked only when that one is at a safe point too. Ended by `glake_use_leave` or with the use.
//
// In a forked child and at the end of the process nothing is done. `GLAKE_CLOSED`: it is parked now, and the thread is not inside: it
// begins a use of its own. `GLAKE_INVALID`: there is no such use.
int32_t glake_use_join(uint64_t use);

// A thread that joined a use is no longer inside it. In a forked child and at the end of the process nothing is done.
//
// `GLAKE_INVALID`: there is no such use.
int32_t glake_use_leave(uint64_t use);

// How it stands with the gate, as a JSON object: "open", "uses" (how many have begun), "parked" (how many of these wait at
// safe points), "closing" (what is being closed: arrays of tags,
// null for everything), "closed" (tags of which memory is evicted). Null on failure; to be given to `glake_string_free`.
char *glake_gate_json(void);

// Pins host memory, so that every GPU copies from and to it at full speed, for programs without a CUDA runtime. The range
// begins and ends between pages.
//
// # Safety
// The range is the caller's, and stays mapped until it is unpinned.
int32_t glake_host_register(void *start,
                            size_t size);

// Unpins what `glake_host_register` pinned. In a forked child and at the end of the process nothing is done.
//
// # Safety
// No copy from or to it is under way.
int32_t glake_host_unregister(void *start);

// Sets how much memory of a device may be made for this process, beside its limit; `GLAKE_LEASE_NONE`: nothing but that bounds it, as
// before the first call. Where more is made already nothing new is until it fits again. The sizes of extents, and what is stitched, are
// as without one.
//
// An allocation above it is told as `GLAKE_LEASE_GROW`, waits for a grant as long as `lease.grow_timeout_ms` says, and is out of memory
// then. A refill comes back as grants come. A shrink lowers the lease by what it gives back.
int32_t glake_lease_set(int32_t device,
                        uint64_t bytes);

// Adds to a device's lease. 0 says that there is none: whoever waits for a grant gives up.
//
// `GLAKE_INVALID`: the device has no lease.
int32_t glake_lease_grant(int32_t device, uint64_t bytes);

// Lowers a device's lease by what is not made of it, and by free memory, which goes back to the driver for it: by `bytes` at most, and
// nothing is waited for. `given`, which may be null, is by how much.
//
// # Safety
// `given` is null or may be written.
int32_t glake_lease_take(int32_t device,
                         uint64_t bytes,
                         uint64_t *given);

// Calls `watcher` for what is wanted of leases and given back; null ends that, also in a forked child and at the end of the process.
// There is one; while there is none nothing is waited for. It is called on the thread at hand, with no lock held but those of regions
// that move. It may call `glake_lease_set`, `_grant` and `_take`, and must neither move regions nor wait.
//
// # Safety
// It may be called on any thread with this context for as long as the process lives.
int32_t glake_lease_watch(LeaseWatcher watcher,
                          void *context);

// The version of this library.
const char *glake_version(void);

// The number of this interface: raised when a structure or a signature changes.
uint32_t glake_abi(void);

// Says what to start with, before the first use: a preset's name or null, the path of a TOML file or null (then the
// file that GLAKE_CONFIG names), and TOML text over the environment, or null. All of it is checked at once.
//
// `GLAKE_INVALID`: already started, or what is wrong in which line; then nothing was changed.
//
// # Safety
// Each is null or a text that ends with a zero.
int32_t glake_configure(const char *preset,
                        const char *file,
                        const char *overrides);

// Opens the devices now, not at first use; a pool still starts when its device is used first. A start that failed is
// tried again by the next call.
int32_t glake_start(void);

// Whether the devices are open. In a forked child of a process whose were: false.
bool glake_started(void);

// How many devices there are.
//
// # Safety
// `count` is null or may be written.
int32_t glake_device_count(int32_t *count);

// What the devices are: "cuda", or "sim:" and the model; null before the start.
const char *glake_device_name(void);

// Of the block that begins at `pointer` these half-open ranges of bytes count and no others: only they, rounded out to 512 bytes, are
// copied when its memory leaves, and the rest has any value once it is back. `ranges` null: all bytes count again. `count` 0 and
// `ranges` not null: none do. Holds until it is said anew, or the block is freed; for memory that is evicted, from its next way out on.
//
// Everything that may still be read counts, what is free and may be hit again too: a cache's blocks that are hashed.
//
// `GLAKE_INVALID`: no block begins there, or a range leaves it; what was said before holds.
//
// # Safety
// `ranges` is null or may be read for `count` ranges.
int32_t glake_live_ranges(const void *pointer,
                          const glake_byte_range *ranges,
                          size_t count);

// As `glake_live_ranges`, asked of `callback` anew at each shrink that takes the block: it calls `add` with `into` for each range, and
// answers 0. It runs on a thread of the library's, with no lock held, once the uses of the block's memory have ended or are parked and
// the work of all GPUs has ended. Where it answers anything else, names a range that leaves the block, or takes longer than
// hooks may (without hooks, `tiers.drain_timeout_ms`; all callbacks of a shrink together), all bytes count, and the report warns of it.
// `drop`, where not null, is called once when `callback` is called no more: some time after the block was freed or something else was
// said of it, and at once where this call fails.
//
// `GLAKE_INVALID`: no block begins there, or `callback` is null.
//
// # Safety
// `callback` and `drop` may be called on any thread with this context, until `drop` was.
int32_t glake_live_callback(const void *pointer,
                            glake_live_callback_function callback,
                            void *context,
                            glake_context_drop drop);

// Calls `observer` on the thread at hand before a request is refused for want of memory; null ends that, also in a forked child and
// at the end of the process. There is one.
//
// # Safety
// It may be called on any thread with this context for as long as the process lives, and calls nothing of the library
// but `glake_stats`.
int32_t glake_on_out_of_memory(glake_out_of_memory_observer observer,
                               void *context);

// Calls `observer` on the thread at hand for memory that was mapped or is about to be unmapped; null ends that. There
// is one.
//
// # Safety
// As `glake_on_out_of_memory`.
int32_t glake_on_mapping(glake_mapping_observer observer,
                         void *context);

// Copies `bytes` bytes of a live block, from `pointer` on, to pinned host memory, after what is on `stream` by now (null, 1 and 2 are the
// default streams of the block's device). `id` is the number by which they are known until `glake_offload_release`; above 0, and
// never given twice. The block may be freed at once: its memory is its stream's again, behind a wait on the GPU for the copy, where
// there is no other. Until it is freed nothing may write to these bytes before the copy is done. Nothing is waited for on the host,
// but for memory to be pinned where none is free. No bytes are no error, wherever they lie.
//
// `GLAKE_OUT_OF_MEMORY`: there is no host memory. `GLAKE_UNSUPPORTED`: it is no memory of this library's, or a private pool's
// (`glake_is_private`), or the stream is captured, or of another context. In each case the bytes stay where they are.
// `GLAKE_INVALID`: they lie in no live block, or were decommitted.
//
// # Safety
// `id` is null or may be written; null is refused.
int32_t glake_offload_begin(const void *pointer,
                            uint64_t bytes,
                            void *stream,
                            uint64_t *id);

// As `glake_offload_begin`, of bytes that are to be checked: when the block is freed they are copied again, to the same host memory, so
// that what comes back is what the block had then, whatever wrote to it meanwhile. Whether they had changed is known of `save` from then
// on, a number that a site (`glake_offload_site_create`) gives to one of its saves in each pass. A copy that was to be made again and
// could not, twice, is told when it is reloaded: `GLAKE_DRIVER`.
//
// # Safety
// As of `glake_offload_begin`.
int32_t glake_offload_begin_checked(const void *pointer,
                                    uint64_t bytes,
                                    void *stream,
                                    uint64_t site,
                                    uint64_t save,
                                    uint64_t *id);

// What is known of a save of a site. `state` is 0 where it is to be checked, as the first two times that it is offloaded; 1 where its bytes did
// not change when it was; 2 where they did, without anybody saying so: they should stay on their GPU.
//
// # Safety
// `state` is null or may be written; null is refused.
int32_t glake_offload_check(uint64_t site,
                            uint64_t save,
                            int32_t *state);

// Begins to copy what was offloaded under `id` to memory of a live block of the same device, after the copy out and after what is on
// `stream` by now, for which the block may have been memory of earlier work. Nothing may be read or written there before a stream waits:
// `glake_offload_wait`. It may be asked for as often as it is needed. A block that is freed before is nobody's until the copy is done.
//
// `GLAKE_INVALID`: nothing is offloaded under `id`, or the bytes do not lie in one live block, or it is another device's.
// `GLAKE_UNSUPPORTED`: as of `glake_offload_begin`. `GLAKE_DRIVER`: also where bytes were lost on their way out, with a GPU.
int32_t glake_offload_reload(uint64_t id,
                             void *pointer,
                             void *stream);

// Has a stream wait, on its GPU, for the last copy that `glake_offload_reload` began under `id`; any stream, as often as needed.
//
// `GLAKE_INVALID`: nothing is offloaded under `id`, or none was begun.
int32_t glake_offload_wait(uint64_t id,
                           void *stream);

// Forgets what was offloaded under `id`; copies that are under way go on. Its host memory is used again behind them, and nothing is
// waited for. In a forked child and at the end of the process nothing is done.
//
// `GLAKE_INVALID`: it was released before, or never given.
int32_t glake_offload_release(uint64_t id);

// Pins host memory for `bytes` bytes of a device that will be offloaded, beside what is in use: to be called ahead, on another thread.
//
// `GLAKE_OUT_OF_MEMORY`: there is not so much, and nothing was pinned; or the driver refused some of it, and what was pinned by then stays.
int32_t glake_offload_prepare(int32_t device,
                              uint64_t bytes);

// Whether an owner counts on the memory at an address: it is a private pool's, or in no live block, as memory that a graph tree keeps
// account of. Such memory is not offloaded, and nothing may free, move or replace it in the owner's place. Of memory that is not this
// library's it is false.
//
// # Safety
// `is_private` is null or may be written; null is refused.
int32_t glake_is_private(const void *pointer,
                         bool *is_private);

// A number for the life of the live block that an address lies in: the same until the block is freed, and no other block's of its device
// ever.
//
// `GLAKE_INVALID`: it lies in no live block. `GLAKE_UNSUPPORTED`: it is no memory of this library's.
//
// # Safety
// `generation` is null or may be written.
int32_t glake_generation(const void *pointer,
                         uint64_t *generation);

// What is offloaded, and what that took, as a JSON object. Null on failure; to be given to `glake_string_free`.
char *glake_offload_stats_json(void);

// Makes a private pool on a device, or adds an owner to it. Pools are named by two numbers, as torch's MempoolId_t.
int32_t glake_pool_create(int32_t device,
                          uint64_t first,
                          uint64_t second);

// Sends allocations on streams that the filter takes (null: on every stream), of any thread, to a private pool from now
// on; the pool is made if there is none. It adds an owner, which `glake_pool_release` takes away. Where several pools
// take a stream, the one that was begun last has it. `drop`, where not null, is called once when the filter is no longer
// needed, also where this fails.
//
// To be called before a stream capture begins: from then on no completion point is recorded on any device, which would
// break the capture, until `glake_pool_end`, or until an allocation for the pool comes on a stream that captures nothing.
// A capture that an allocation was seen in ends that itself, where it fails too. One without allocations that failed
// ends it with the calling thread, or with that thread's next allocation on the device that is in no capture. A pool can
// be begun again then without `glake_pool_end`.
//
// # Safety
// `filter` and `drop` may be called on any thread with this context, and do not call back into the library.
int32_t glake_pool_begin(int32_t device,
                         uint64_t first,
                         uint64_t second,
                         glake_stream_filter filter,
                         void *context,
                         glake_context_drop drop);

// Says on which stream the capture begins that `glake_pool_begin` was called for. An allocation of the same thread on a stream
// outside of the capture is then no sign that there is none.
int32_t glake_pool_expect_capture(int32_t device,
                                  uint64_t first,
                                  uint64_t second,
                                  void *stream);

// Ends what `glake_pool_begin` began; the pool and its owners stay. In a forked child and at the end of the process nothing is done.
int32_t glake_pool_end(int32_t device,
                       uint64_t first,
                       uint64_t second);

// One owner less. With the last one the pool is given up: its memory goes back once its blocks are freed and all work
// enqueued before is done. In a forked child and at the end of the process nothing is done.
int32_t glake_pool_release(int32_t device,
                           uint64_t first,
                           uint64_t second);

// How many owners a pool has; 0 where there is none, as in a forked child and at the end of the process.
//
// # Safety
// `count` is null or may be written.
int32_t glake_pool_use_count(int32_t device, uint64_t first, uint64_t second, int32_t *count);

// Releases what is free in a private pool, for `torch.cuda.MemPool`: not in the pool of a graph that may be replayed.
// In a forked child and at the end of the process nothing is done.
int32_t glake_pool_trim(int32_t device,
                        uint64_t first,
                        uint64_t second);

// Calls `visit` for each live block of a private pool.
//
// # Safety
// `visit` may be called with this context, and does not call back into the library.
int32_t glake_pool_blocks(int32_t device,
                          uint64_t first,
                          uint64_t second,
                          glake_block_visit visit,
                          void *context);

// Remembers which blocks of a private pool are live, as torch's getCheckpointState does; to be given to
// `glake_checkpoint_drop`.
//
// # Safety
// `out` is null or may be written.
int32_t glake_pool_checkpoint(int32_t device, uint64_t first, uint64_t second, glake_checkpoint **out);

// Brings a private pool back to a checkpoint, as torch's setCheckpointPoolState does: what is live now is freed, and what
// was live then is live again at the same addresses. `freed` is called for each block that was live before, `allocated`
// for each that is live now, both for one that stays. No byte is written and no stream waits. Either may be null.
//
// `GLAKE_INVALID`: the pool was released, or memory of those blocks went back to the driver since; nothing was changed.
//
// # Safety
// The checkpoint is null or alive; the functions may be called with this context, and do not call back into the library.
int32_t glake_pool_restore(const glake_checkpoint *checkpoint,
                           glake_block_freed freed,
                           glake_block_visit allocated,
                           void *context);

// Forgets a checkpoint; null is no error.
//
// # Safety
// It is null or alive, and not used again.
void glake_checkpoint_drop(glake_checkpoint *checkpoint);

// Makes a region of this tag, on every device where something is allocated in it. The same again is no error. `host_copy` may have
// `GLAKE_HOST_COPY_CLEAN` in it.
//
// `GLAKE_INVALID`: there is one of this tag with another policy; the tag is "default" or begins with "graph ".
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_define(const char *tag,
                            uint32_t policy,
                            uint32_t host_copy);

// The calling thread's allocations go to this region from now on, but for those that a private pool takes. Entries nest.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_push(const char *tag);

// The calling thread leaves the region that it entered last. In a forked child and at the end of the process nothing is done.
int32_t glake_region_pop(void);

// The program promises not to write to a region's bytes until it is unsealed; nothing new is handed out of it. With `strict` its
// memory is mapped read-only, which waits until no use of it runs.
//
// `GLAKE_INVALID`: its policy is not `GLAKE_POLICY_SEALED`.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_seal(const char *tag,
                          bool strict);

// A region's bytes may change again; copies of them that were kept go.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_unseal(const char *tag);

// Pins host memory for a region's live bytes ahead, where it was made with `GLAKE_HOST_COPY_PREPARE`.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_prepare(const char *tag);

// Keeps the memory of the block that an address lies in on its GPU, or no longer: in a forked child and at the end of the process
// that does nothing.
int32_t glake_region_fix(const void *pointer,
                         bool fixed);

// Work that is enqueued later on a stream of the device finds the region there: what is evicted comes back first.
//
// # Safety
// `tag` is null or a text that ends with a zero; `stream` is null or a stream of the device.
int32_t glake_region_wait(const char *tag,
                          int32_t device,
                          void *stream);

// Which regions come back first. The others come after them, in the order of their first allocations.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros.
int32_t glake_region_order(const char *const *tags, size_t count);

// The tag of the region that a block lies in, to be given to `glake_string_free`; null where it lies in none, or is no block:
// `glake_last_error` is left as it is then.
char *glake_region_of(const void *pointer);

// Every region on every device, as a JSON array: "tag", "policy", "host_copy", "sealed", "device" (null: nothing was allocated yet),
// "resident", "evicted", "decommitted" (blocks whose memory was given up, addresses kept) and "live" in bytes, "place" (where most of what
// is evicted is), "places" (bytes by place), "clean" (null: idle memory is not copied ahead; in bytes "now", what has a copy, and so far
// "copied", "voided" by uses, allocations and copies, "released" without another copy, "refused" because they had changed though nobody
// used them, "reclaimed" for others), "predicted_refill_seconds". Memory of no region is "default", that of private pools "graph (a, b)". Null on failure; to be given
// to `glake_string_free`.
char *glake_regions_json(void);

// Lets work of `device` touch pool memory of `peer`, what there is and what comes.
int32_t glake_enable_peer(int32_t device, int32_t peer);

// Makes the block that an address lies in available to other processes of the same user, until it is freed: a handle of
// at most `capacity` bytes, its length, and where the address lies in what the handle opens. An opener maps whole extents
// and so can see what else lies in them. A handle is some tens of bytes and a few more for each extent; where `capacity`
// is too small, `length` says what is needed.
//
// # Safety
// `handle` is null or may be written for `capacity` bytes; `length` and `offset` are null or may be written.
int32_t glake_share(const void *pointer,
                    uint8_t *handle,
                    size_t capacity,
                    size_t *length,
                    uint64_t *offset);

// Opens what another process shared, for work of a device and of those that may touch its pool memory. The same handle
// opened again gives the same address. The process that shared it must live and keep the block until this returns.
//
// # Safety
// `handle` is null or may be read for `length` bytes; `base` is null or may be written.
int32_t glake_open_shared(const uint8_t *handle,
                          size_t length,
                          int32_t device,
                          void **base);

// Ends one use of what `glake_open_shared` opened. With the last it is unmapped, after all work that was enqueued before;
// that is waited for, or put off while a capture is open. In a forked child and at the end of the process nothing is done.
int32_t glake_close_shared(void *base);

// Gives memory of GPUs back; blocks keep their addresses and, but for regions made with `GLAKE_POLICY_DISCARD`, their bytes.
// `request` is null (everything, to the host) or a JSON object: "tags" (an array; absent: all, the memory of no region and private
// pools too), "bytes" (at least so much, what costs least first; absent: all), "tier" ("host", "peer", "peer:1", "file"), "verify",
// "timeout_ms" (for uses that run to end).
//
// Uses of what leaves (`glake_use_begin`) are waited for, and new ones held until it is back. A program that enters no gate must
// enqueue no work on what leaves until it is refilled. Other threads' allocations and copies of it bring it back.
//
// The report is a JSON object, to be given to `glake_string_free`. In bytes: "freed", "copied", "clean" (of what left, what was copied
// before), "undefined" (what did not count, and was not copied), "resident". "regions": an array of "tag", "device", the same in bytes,
// "evicted" (all that is away), "place" (where most of it is; absent: nothing is away) and "skipped": an array of "device", "address",
// "size", "reason", one of "fixed", "exported", "withheld". "skipped": where everything was to leave, what lies in no region and had to
// stay, with the reason "imported". "warnings": texts, of live callbacks that did not tell, and of GPUs that do not tell what they hold.
// "gpu": an array of "device" (null for the host), "holder", "bytes". "seconds", "predicted_refill_seconds". Null on failure (`glake_last_status` says which,
// `glake_last_error` what was evicted by then): no bytes are lost, and the same call goes on from there.
//
// # Safety
// `request` is null or a text that ends with a zero.
char *glake_shrink(const char *request);

// Brings memory back to the addresses that it had. `request` is null (everything) or a JSON object: "tags", "bytes", "verify" as
// `glake_shrink`; "wait" (false: it goes on in the background, and the report is empty); "timeout_ms" (how long it is waited for;
// absent: until it is over).
//
// The report is a JSON object, to be given to `glake_string_free`: "mapped", "copied", "evicted" (what is still away) in bytes, "regions"
// (an array of "tag", "device", "mapped", "copied", "resident", "evicted", "place", the last where something is still away), "seconds". Null on failure, as `glake_shrink`. `GLAKE_CLOSED`: the time is over, and the refill goes on in the
// background.
//
// # Safety
// `request` is null or a text that ends with a zero.
char *glake_refill(const char *request);

// What is on each GPU and who holds it, as a JSON array of "device", "holder" and "bytes", as "gpu" of a shrink's report. Null on
// failure; to be given to `glake_string_free`.
char *glake_memory_usage_json(void);

// Calls `before` and `after` around every shrink and refill that is asked for; null: none. The event is a JSON object: "event"
// ("shrink", "refill"), "when" ("before", "after"), "tags", "bytes", and after it "report" or "error". They run on threads of
// their own and are waited for up to `timeout_ms` (-1: for ever). Where `before` answers anything but 0, or takes longer, nothing
// is moved. Of memory that comes back because it is touched they are told too ("touched": true, "device"), and nothing waits for
// them. Replaces those that were there: to have none succeeds in a forked child and at the end of the process too.
//
// # Safety
// They may be called on any thread with this context for as long as the process lives.
int32_t glake_hooks_set(glake_hook before,
                        glake_hook after,
                        void *context,
                        int64_t timeout_ms);

// Makes a site of a program that offloads: it learns from each of its passes in which order what it packs is read, and says when
// reloads begin. A pass begins with the first item that is packed and ends when all that were are dropped. `site` is its number,
// above 0, and never given twice.
//
// # Safety
// `site` is null or may be written; null is refused.
int32_t glake_offload_site_create(uint64_t *site);

// Forgets a site and what it learned. In a forked child and at the end of the process nothing is done.
//
// `GLAKE_INVALID`: it was released before, or never made.
int32_t glake_offload_site_release(uint64_t site);

// What plans of a site are for, from its next pass on: `preset` 0 the least time under the budget, 1 the least memory without computing
// anything again (as where nothing was asked), 3 as 0, but of a layer that is computed
// again leaves may be stored one by one. `budget` is what the GPU may show of the process, contexts included, in bytes; 0: anything.
//
// `GLAKE_INVALID`: there is no such site, device or preset.
int32_t glake_offload_ask(uint64_t site,
                          int32_t device,
                          uint64_t budget,
                          int32_t preset);

// Whether a forward that is about to begin has to tell what it saves: not where the plan of a pass of the same `shape` keeps everything,
// memory has room as it had, and nothing went above the budget since. A shape is a number of the caller's, one for all forwards that save
// the same.
//
// `GLAKE_INVALID`: there is no such site, or a pass that had the same forwards before this one was above its budget, and needs what the
// text says.
//
// # Safety
// `needs` is null or may be written; null is refused.
int32_t glake_offload_needs(uint64_t site,
                            uint64_t shape,
                            bool *needs);

// What a site was asked for, what its last plan says and what its passes were, as a JSON object (docs/METRICS.md); with `course` the
// plan's pass step by step. Null on failure; to be given to `glake_string_free`.
char *glake_offload_site_json(uint64_t site,
                              bool course);

// The next bytes that a pass saves, each range once. `item` is their number in the pass, from 0 on; `verdict` whether they are to stay
// (0), to be offloaded (1), or not to be stored, as their layer computes them again (2, of leaves alone: nobody drops such an item).
// `begin` has room for `room` items and gets those whose reloads are to begin first, in this order; `count` how many these are. Those that
// find no room come with the next call of the site.
//
// `GLAKE_INVALID`: there is no such site, or no such `leaf`.
//
// # Safety
// `pack` may be read, and `item`, `verdict` and `count` may be written, or are null, which is refused; `begin` may be written `room` times.
int32_t glake_offload_packed(uint64_t site,
                             const glake_pack *pack,
                             uint64_t *item,
                             int32_t *verdict,
                             uint64_t *begin,
                             size_t room,
                             size_t *count);

// A leaf is computed from here on, until its output is packed: so long it would take to compute it again, by the stream that the pass
// began on.
//
// `GLAKE_INVALID`: there is no such site.
int32_t glake_offload_leaf_begins(uint64_t site);

// Times of the pass that is under way do not count: it computes what later ones will not, to compare it with what is stored.
//
// `GLAKE_INVALID`: there is no such site.
int32_t glake_offload_untimed(uint64_t site);

// A layer is computed again: from here on (`begins`), or until here, by the stream that the pass began on. Reloads that are to begin come
// with the next call that tells any.
//
// `GLAKE_INVALID`: there is no such site.
int32_t glake_offload_replays(uint64_t site,
                              uint32_t scope,
                              bool begins);

// An item of the pass is read, or read once more. `begin`, `room` and `count` as of `glake_offload_packed`.
//
// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
//
// # Safety
// `count` may be written, or is null, which is refused; `begin` may be written `room` times.
int32_t glake_offload_unpacked(uint64_t site, uint64_t item, uint64_t *begin, size_t room, size_t *count);

// What was reloaded of an item is gone from its GPU again, and the item may be read once more.
//
// `GLAKE_INVALID`: there is no such site.
int32_t glake_offload_freed(uint64_t site, uint64_t item);

// Nobody reads an item any more. In a forked child and at the end of the process nothing is done.
//
// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
int32_t glake_offload_dropped(uint64_t site, uint64_t item);

// The state of all pools as torch's `_cuda_memorySnapshot` tells it, as JSON. Null on failure; to be given to
// `glake_string_free`.
char *glake_snapshot_json(void);

// Calls `segment` for every mapped range of a device, each followed by `block` for what lies in it. Either may be null.
//
// # Safety
// The functions may be called with this context, and do not call back into the library.
int32_t glake_segments(int32_t device,
                       glake_segment_visit segment,
                       glake_segment_block_visit block,
                       void *context);

// Starts or stops to keep events for the snapshot: the last `max_entries` of them. `clear` forgets those that were kept.
int32_t glake_record_history(bool enabled,
                             uint64_t max_entries,
                             bool clear);

// Whether events are kept.
bool glake_history_enabled(void);

// The statistics of a device; zeroes where its pool has not started.
//
// # Safety
// `out` is null or may be written.
int32_t glake_stats(int32_t device, glake_device_stats *out);

// Starts the peaks of a device from what is now.
int32_t glake_reset_peaks(int32_t device);

// Starts the totals of a device, and what was done, from zero.
int32_t glake_reset_totals(int32_t device);

// The statistics as a JSON object: torch's flat keys ("active_bytes.all.peak"), and ours under "glake.". Null on failure;
// to be given to `glake_string_free`.
char *glake_stats_json(int32_t device);

// Gives back a text that this library handed out; null is no error.
//
// # Safety
// It is null, or such a text, and not used again.
void glake_string_free(char *text);

// Why the calling thread's last call that failed did so; empty before. It stays until the thread's next call that fails.
const char *glake_last_error(void);

// The status of the calling thread's last call that failed, for those that return no status; `GLAKE_OK` before.
int32_t glake_last_status(void);

// As `glake_last_error`.
const char *gmlake_last_error(void);

// Makes a stream of a device that does not synchronise with the legacy default one.
//
// # Safety
// `out` is null or may be written.
int32_t glake_stream_create(int32_t device, void **out);

// Waits on the host until the work of a stream is done. The device may be -1: that of the stream, or the current one of the
// calling thread for a default stream.
//
// # Safety
// `stream` is null or a stream of the device.
int32_t glake_stream_synchronize(int32_t device,
                                 void *stream);

// Destroys a stream of `glake_stream_create`; its work still runs to its end. In a forked child and at the end of the process
// nothing is done.
int32_t glake_stream_destroy(int32_t device,
                             void *stream);

// Hands out a block for work on a stream of the device; null for size 0. On failure it throws std::runtime_error where
// torch is loaded, else returns null; gmlake_last_error says why.
//
// # Safety
// As `glake_alloc`.
void *gmlake_malloc(size_t size,
                    int32_t device,
                    void *stream);

// Takes a block back. Only the pointer is looked at. A pointer that is no block's is logged, and nothing is changed.
void gmlake_free(void *pointer,
                 size_t _size,
                 int32_t _device,
                 void *_stream);

// Opens the devices; throws as gmlake_malloc does. It need not be called.
//
// # Safety
// None needed; it is unsafe because it is a jump.
void gmlake_init(int32_t device_count);

// Empties the cache: waits for pending frees and releases what is free, on all devices. Blocks stay. Throws as
// gmlake_malloc does; in a forked child and at the end of the process nothing is done.
//
// # Safety
// As `gmlake_init`.
void gmlake_reset(void);

// Changes the part of a device's memory that may be reserved. Throws as gmlake_malloc does.
//
// # Safety
// As `gmlake_init`.
void gmlake_memory_fraction(double fraction, int32_t device);

// Where the block that an address lies in begins; null where there is none. `size`, where not null, gets what was asked
// for.
//
// # Safety
// `size` is null or may be written.
void *gmlake_base_alloc(void *ptr,
                        size_t *size);

// As `glake_record_stream`; nothing is done where no block of ours begins at the pointer.
//
// # Safety
// As `glake_record_stream`.
void gmlake_record_stream(void *ptr, void *stream);

// Enqueues a copy on a stream of any device (null and 1: the legacy default stream of the calling thread's current device, 2:
// the thread's own). `handle`, where not null, gets what `glake_copy_wait` takes, or 0 where nothing is left to wait for.
//
// Where it is as large as the break-even, one end is host memory and the other a GPU's, and relays are on and ready, it goes
// over several links; else it is the driver's own copy. Memory that is copied from stays as it is, and both stay allocated,
// until the copy has run: as for `cuMemcpyAsync`.
//
// `GLAKE_DRIVER`: the driver refused, or a GPU was lost that carried parts of earlier copies, whose bytes may not have
// arrived; this copy was not made then.
//
// # Safety
// Both ranges are memory, the first of which nothing else touches unordered until the copy has run; `stream` is a stream;
// `handle` is null or may be written.
int32_t glake_copy_async(void *to,
                         const void *from,
                         size_t size,
                         void *stream,
                         uint32_t flags,
                         uint64_t *handle);

// Waits on the host until the bytes of a copy are there, and ends its handle. 0 is no error.
//
// `GLAKE_DRIVER`: they are not, or may not be. `GLAKE_INVALID`: the handle was waited for before, or never given.
int32_t glake_copy_wait(uint64_t handle);

// Ends the handle of a copy without waiting for it: the copy goes on, and nobody is told how it ended. 0 is no error. Every handle is
// ended by this or by `glake_copy_wait`; until then it keeps an event of the driver. In a forked child and at the end of the process
// nothing is done.
//
// `GLAKE_INVALID`: the handle was ended before, or never given.
int32_t glake_copy_drop(uint64_t handle);

// Whether the bytes of a copy are there; the handle stays. Errors are those of `glake_copy_wait`, which still ends the
// handle then.
//
// # Safety
// `done` is null or may be written.
int32_t glake_copy_done(uint64_t handle,
                        bool *done);

// Enqueues copies, in no order among themselves: as one `glake_copy_async`, for many small blocks.
//
// # Safety
// `blocks` may be read for `count` blocks; for each, and for the rest, as `glake_copy_async`.
int32_t glake_copy_list(const glake_copy_block *blocks,
                        size_t count,
                        void *stream,
                        uint32_t flags,
                        uint64_t *handle);

// Enqueues copies of one range of host memory to several GPUs: it is read once, and passed on between them.
//
// # Safety
// `to` may be read for `count` pointers; for each, and for the rest, as `glake_copy_async`.
int32_t glake_copy_to_all(void *const *to,
                          size_t count,
                          const void *from,
                          size_t size,
                          void *stream,
                          uint32_t flags,
                          uint64_t *handle);

// For those who have a copy of their own to make where this one is none for the engine, as the preload library: 0 where it
// was enqueued (with `GLAKE_COPY_BLOCKING`: made), 1 where nothing was done, because it is too small, is not between host and
// GPU, does not go the way that `GLAKE_COPY_TO_GPU` or `GLAKE_COPY_FROM_GPU` asks for, the driver refused before anything was
// enqueued, or no relays are on and ready. Below 0 it is the driver's own error, negated. Any other answer is an error as of
// `glake_copy_async`; after `GLAKE_INVALID`, `GLAKE_UNAVAILABLE` and `GLAKE_UNSUPPORTED` too nothing was done.
//
// # Safety
// As `glake_copy_async`.
int32_t glake_copy_try(void *to,
                       const void *from,
                       size_t size,
                       void *stream,
                       uint32_t flags);

// Which GPU's memory is at an address; -1 for the host's, and for memory that moves between them as it is touched.
//
// # Safety
// `device` is null or may be written.
int32_t glake_device_of(const void *at,
                        int32_t *device);

// Lets copies use the links of the other visible GPUs (1), or no longer (0). They are made ready in the background, at the
// cost of a context on each; copies take one link until then, and none waits for it. Twice is no error.
//
// `GLAKE_INVALID`: the configuration has `transfer.multi_path = "never"`, or several processes of the program run on this machine
// and it does not say `true`.
int32_t glake_multi_path(int32_t on);

// What copies did as a JSON object: relays that are ready and what they cost, and for each path its bytes, slices, busy time
// and retries. Null on failure; to be given to `glake_string_free`.
char *glake_copy_stats_json(void);

#ifdef __cplusplus
// Torch's signatures with C++ by value. Sends allocations on streams that the filter takes to a private pool; throws as
// gmlake_malloc does.
void gmlake_begin_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> id,
                                   std::function<bool(struct CUstream_st *)> filter);

// Ends that; a failure is logged.
void gmlake_end_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> id);

// One owner of a private pool less; a failure is logged.
void gmlake_release_pool(int device, std::pair<unsigned long long, unsigned long long> id);
} // extern "C"
#endif

#endif // GLAKE_GMLAKE_H
