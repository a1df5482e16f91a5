// libgmlake.so: GPU memory that does not fragment, for C and for torch's pluggable allocator.
// Written by cbindgen from the crate glake-ffi. docs/SEMANTICS.md describes the guarantees.
//
// Every glake_* function that can fail returns a status; glake_last_error() returns the text of the calling thread's last failure.
// All functions may be called from any thread. The library starts at the first call that needs a device.

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

// Status of a call that succeeded.
#define GLAKE_OK 0

// Not enough memory after everything reclaimable was reclaimed: request less, free memory, or raise the limit.
#define GLAKE_OUT_OF_MEMORY 1

// An argument is invalid, or names no device, block or pool; nothing was changed.
#define GLAKE_INVALID 2

// The driver refused, or GLake itself failed.
#define GLAKE_DRIVER 3

// The library is unavailable: no driver, an invalid configuration, a second copy of the library, a forked child, or the end of the
// process.
#define GLAKE_UNAVAILABLE 4

// The operation is not supported here.
#define GLAKE_UNSUPPORTED 5

// The operation is not possible now. Memory to be used is evicted, a hook refused, or ranks did not agree: the call moved nothing.
#define GLAKE_CLOSED 6

// The timeout of the call expired. Uses did not end or a hook did not return: nothing was moved. A refill continues in the background.
#define GLAKE_TIMEOUT 7

// A use that begins while its memory is evicted refills the memory, and waits for it.
#define GLAKE_WHEN_CLOSED_REFILL 0

// A use that begins while its memory is evicted waits until another call refills it.
#define GLAKE_WHEN_CLOSED_HOLD 1

// A use that begins while its memory is evicted fails with `GLAKE_CLOSED`.
#define GLAKE_WHEN_CLOSED_REFUSE 2

// A region's bytes are copied out on eviction, and copied back on refill.
#define GLAKE_POLICY_KEEP 0

// `GLAKE_POLICY_KEEP` for a region that can be sealed: its bytes must not be written while it is sealed.
#define GLAKE_POLICY_SEALED 1

// The bytes are discarded on eviction: after a refill the blocks have their addresses, and undefined bytes.
#define GLAKE_POLICY_DISCARD 2

// The host copy is released once the bytes are back on the GPU.
#define GLAKE_HOST_COPY_DROP 0

// The host copy of a sealed region is kept: the next eviction needs no copy.
#define GLAKE_HOST_COPY_RETAIN 1

// `GLAKE_HOST_COPY_DROP` with host memory pinned ahead: by `glake_region_prepare`, and in the background while no use runs.
#define GLAKE_HOST_COPY_PREPARE 2

// Flag beside one of these: the bytes are copied to the host while no use runs, and stay on the GPU; bytes unchanged since are evicted
// without a copy.
#define GLAKE_HOST_COPY_CLEAN 16

// Value of a lease that does not exist: only the limit bounds a pool.
#define GLAKE_LEASE_NONE UINT64_MAX

// Event of a lease: a refill is pending and needs this many more bytes, including the growth after it.
#define GLAKE_LEASE_WANT 0

// Event of a lease: an allocation exceeds it by this many bytes and waits; or a commit, or a refill whose grants were used by others.
#define GLAKE_LEASE_GROW 1

// Event of a lease: a shrink returned this many bytes, by which the lease is now lower.
#define GLAKE_LEASE_RETURNED 2

// Event of a lease: a thread still waits for a grant. Repeated on the waiting thread: a watcher may let other threads run.
#define GLAKE_LEASE_WAITING 3

// A copy of normal priority.
#define GLAKE_COPY_NORMAL 0

// A copy that background copies make way for.
#define GLAKE_COPY_CRITICAL 1

// A copy that makes way for others: few bytes of it are in flight at a time.
#define GLAKE_COPY_BACKGROUND 2

// The call returns once the copy is complete.
#define GLAKE_COPY_BLOCKING 16

// Verification of a copy with `GLAKE_COPY_BLOCKING`. Source and destination are read and compared, whatever path the copy took. Bytes that
// differ are copied again by the driver; if they still differ, the call fails.
#define GLAKE_COPY_VERIFY 32

// Stream 0 means the calling thread's default stream instead of the legacy default stream.
#define GLAKE_COPY_PTDS 64

// The copy uses only the GPU's own link, as a copy by the driver does.
#define GLAKE_COPY_DIRECT 128

// Direction for `glake_copy_try` alone: the copy must be from host memory to a GPU, or is not taken. Not with `GLAKE_COPY_FROM_GPU`.
#define GLAKE_COPY_TO_GPU 256

// Direction for `glake_copy_try` alone: the copy must be from a GPU to host memory, or is not taken. Not with `GLAKE_COPY_TO_GPU`.
#define GLAKE_COPY_FROM_GPU 512

// Multiplied by a device's number plus one: streams 0, 1 and 2 are that device's default streams, not those of the calling thread's
// current device.
#define GLAKE_COPY_DEVICE 65536

// Opaque record of the blocks of a private pool that were live at one time.
typedef struct glake_checkpoint glake_checkpoint;

// A live block of memory.
typedef struct {
    // Address of its first byte.
    void *base;
    // Size in bytes, which is the request rounded up to 512.
    uint64_t size;
    // Requested size in bytes.
    uint64_t requested;
    // Device of the memory.
    int32_t device;
} glake_block;

// Called for a lease event (`GLAKE_LEASE_WANT` and the others) of a device, with its number of bytes.
typedef void (*LeaseWatcher)(void *context, int32_t event, int32_t device, uint64_t bytes);

// Bytes that a pass saves.
typedef struct {
    // Number of bytes to save.
    uint64_t size;
    // Number of bytes to transfer, if fewer restore exactly the same content; 0: all.
    uint64_t link_size;
    // Number of the layer that saves the bytes, chosen by the pass for one run of the layer; negative: none.
    int64_t scope;
    // Role in a recomputable leaf of the layer: 1 its output; 2 saved beside the output reported before, and not stored if that is not; 0
    // none.
    uint8_t leaf;
    // Stream that produces the bytes.
    void *stream;
} glake_pack;

// Returns whether allocations on a stream go to a pool; called on the allocating thread.
typedef bool (*glake_stream_filter)(void *context, void *stream);

// Called once when the library no longer needs a context.
typedef void (*glake_context_drop)(void *context);

// Called once for each block.
typedef void (*glake_block_visit)(void *context, void *pointer, uint64_t size);

// Called for each freed block.
typedef void (*glake_block_freed)(void *context, void *pointer);

// Half-open range of bytes of a block, counted from its start.
typedef struct {
    // Offset of the first byte.
    uint64_t start;
    // Offset behind the last byte.
    uint64_t end;
} glake_byte_range;

// Passed to a live callback, which calls it for each half-open range of live bytes.
typedef void (*glake_live_range_add)(void *into, uint64_t start, uint64_t end);

// Reports the live bytes of a block: calls `add` with `into` for each range, and returns 0.
typedef int32_t (*glake_live_callback_function)(void *context, glake_live_range_add add, void *into);

// Called before and after memory is evicted or refilled, with the event as JSON; returns 0 on success.
typedef int32_t (*glake_hook)(void *context, const char *event_json);

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

// A mapped range of addresses.
typedef struct {
    // Address of its first byte.
    uint64_t address;
    // Size of the range in bytes.
    uint64_t size;
    // Stream of its first block that belongs to a stream.
    void *stream;
    // First number of its private pool; 0 and 0: no private pool.
    uint64_t pool_first;
    // Second number of its private pool.
    uint64_t pool_second;
    // Device of the memory.
    int32_t device;
    // Whether it holds requests above 1 MiB.
    bool large;
    // Whether it is a second mapping of memory that other segments count: it reserves none.
    bool stitched;
} glake_segment;

// Called once for each segment.
typedef void (*glake_segment_visit)(void *context, const glake_segment *segment);

// A part of a segment.
typedef struct {
    // Address of its first byte.
    uint64_t address;
    // Size of the part in bytes.
    uint64_t size;
    // Requested size in bytes; 0 if free.
    uint64_t requested;
    // Whether it belongs to a live block.
    bool live;
    // Whether it is freed but still in use by other streams.
    bool pending;
} glake_segment_block;

// Called for each part of the preceding segment, in order.
typedef void (*glake_segment_block_visit)(void *context, const glake_segment_block *block);

// Called for a request that is about to be refused; `total` is the device's memory, `free` its free memory, in bytes.
typedef void (*glake_out_of_memory_observer)(void *context,
                                             int32_t device,
                                             uint64_t requested,
                                             uint64_t total,
                                             uint64_t free);

// Called for memory that was mapped for blocks (`mapped`) or is about to be unmapped.
typedef void (*glake_mapping_observer)(void *context,
                                       int32_t device,
                                       bool mapped,
                                       uint64_t address,
                                       uint64_t size);

// A copy in a list of copies.
typedef struct {
    // Destination of the bytes.
    void *to;
    // Source of the bytes.
    const void *from;
    // Number of bytes to copy.
    size_t size;
} glake_copy_block;

// Allocates a block for work on a stream of the device; callable on any thread, whatever its current device. Size 0 gives null.
//
// `GLAKE_OUT_OF_MEMORY`: not enough memory after everything reclaimable was reclaimed and every pending free was waited for.
//
// # Safety
// `stream` is null or a stream of the device; `out` is null or may be written.
int32_t glake_alloc(int32_t device,
                    size_t size,
                    void *stream,
                    void **out);

// Frees a block; its address identifies the device. Null is no error. The block's own stream may reuse the bytes at once, other streams
// once all work enqueued before has completed. Does nothing in a forked child.
//
// `GLAKE_INVALID`: no live block begins there; nothing was changed.
int32_t glake_free(void *pointer);

// Finds the live block that contains an address.
//
// # Safety
// `out` is null or may be written.
int32_t glake_find(const void *pointer, glake_block *out);

// Records that work of a stream, of any device, uses a block that was allocated for another stream: its memory is reused, by any stream,
// only after that work. Null, 1 and 2 are the default streams of the block's device and of the thread's current one.
//
// # Safety
// `stream` is null or a stream.
int32_t glake_record_stream(void *pointer,
                            void *stream);

// Returns the size of the largest request that could be served now, with stitching and growing.
//
// # Safety
// `bytes` is null or may be written.
int32_t glake_largest(int32_t device, uint64_t *bytes);

// Waits for pending frees (unless a capture is open), then releases free memory until at most `keep` bytes are reserved: on one device, or
// with -1 on each. `released`, if not null, receives the number of bytes released. Does nothing in a forked child and at the end of the
// process.
//
// # Safety
// `released` is null or may be written.
int32_t glake_trim(int32_t device,
                   uint64_t keep,
                   uint64_t *released);

// Sets the fraction of a device's memory that may be reserved, 0 to 1; also before its first use. A configured limit still holds.
int32_t glake_set_fraction(int32_t device,
                           double fraction);

// Returns the fraction of a device's memory that may be reserved.
//
// # Safety
// `fraction` is null or may be written.
int32_t glake_fraction(int32_t device, double *fraction);

// Releases the physical memory of `bytes` bytes from `pointer` on, which must lie in one live block. Whole extents inside the range are
// released (extents of up to four times `tiers.extent` in a region, `pool.extent` outside of regions). The block keeps its addresses; the
// bytes are lost, and must not be accessed until `glake_commit`: a kernel that does faults, `glake_copy_*` refuses. No work on them may be
// enqueued from this call on; the call waits for work enqueued before. Memory that is fixed, or shared with other processes, stays.
// `decommitted`, if not null, receives the number of bytes released. The memory is available to others at once, and stays leased until a
// shrink of everything returns the unused part of the lease.
//
// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed, or belongs to a captured graph. Refused while a capture is
// open.
//
// # Safety
// `decommitted` is null or may be written.
int32_t glake_decommit(const void *pointer,
                       uint64_t bytes,
                       uint64_t *decommitted);

// Creates memory for the decommitted parts of `bytes` bytes from `pointer` on, at their addresses; the bytes are undefined. Evicted memory
// of their region is refilled first. `committed`, if not null, receives the number of bytes created.
//
// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed. `GLAKE_OUT_OF_MEMORY`: memory created by then stays, and a
// repeated call continues.
//
// # Safety
// `committed` is null or may be written.
int32_t glake_commit(const void *pointer,
                     uint64_t bytes,
                     uint64_t *committed);

// Copies `bytes` bytes of evicted memory at `from`, which must lie in one live block, to host memory at `to`: from their copy in host
// memory, without the GPU and without a refill. Bytes that were declared dead (`glake_live_ranges`) are 0.
//
// `GLAKE_INVALID`: the bytes lie in no live block, or some of them are on a GPU or in a file; the bytes at `to` are 0 then.
//
// # Safety
// `to` may be written for `bytes` bytes, and no other thread accesses them during the call.
int32_t glake_read_evicted(void *to,
                           const void *from,
                           uint64_t bytes);

// Begins a use of these regions and of all memory outside of regions; with `count` 0, of everything. Until `glake_use_end` none of this
// memory is evicted: a shrink waits. Any thread may end the use. Uses do not nest: if a shrink waits for a use, another use that begins
// inside it waits for that shrink.
//
// `GLAKE_INVALID`: no region has one of these tags; the text lists the existing ones. `GLAKE_CLOSED`: the memory is evicted, and
// `when_closed` says to refuse. `GLAKE_TIMEOUT`: `timeout_ms` (-1: none) has expired; a refill that the call began continues, and the next
// use benefits.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros; `use` is null or may be written.
int32_t glake_use_begin(const char *const *tags,
                        size_t count,
                        uint32_t when_closed,
                        int64_t timeout_ms,
                        uint64_t *use);

// Waits until a use of these regions could begin, without beginning one: no shrink waits for the caller. If a shrink comes first, the next
// use waits again.
//
// Returns the same statuses as `glake_use_begin`.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros.
int32_t glake_gate_wait(const char *const *tags,
                        size_t count,
                        uint32_t when_closed,
                        int64_t timeout_ms);

// Ends a use of memory. Does nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: the use was ended before, or never begun.
int32_t glake_use_end(uint64_t use);

// Marks a safe point between two steps of a use: the thread needs none of the use's memory now, and work that it has enqueued completes
// without its help. If a shrink waits for the use, the thread waits here until all of the memory is back. The shrink proceeds once all
// threads of the use wait and the work of the process on its GPUs has completed. Without a waiting shrink the call costs one load. Does
// nothing for a use that has ended, in a forked child, and at the end of the process. Returns whether it waited. Not under a capture.
int32_t glake_safepoint(uint64_t use);

// Returns whether a shrink waits for uses or is in progress; if not, safe points have nothing to do.
bool glake_safepoint_wanted(void);

// Arrives at a safe point without waiting: the first half of `glake_safepoint`. Returns 1 if the thread has to wait, with
// `glake_safepoint_go_on` until that returns 1.
int32_t glake_safepoint_arrive(uint64_t use);

// Leaves a safe point: the second half of `glake_safepoint`. Waits at most `timeout_ms` (-1: no timeout) until all memory of the use is
// back. Returns 0 if the timeout expired first; the thread then has to call again before it continues.
int32_t glake_safepoint_go_on(uint64_t use,
                              int64_t timeout_ms);

// Returns whether a shrink waits for this use, which may be parked now because it has run for its quantum.
bool glake_use_wanted(uint64_t use);

// Arrives at a safe point like `glake_safepoint_arrive`, for a thread that must first agree with others, such as one of several ranks: no
// memory of the use moves before `glake_vote_cast`. Returns 1 if the thread has to wait: it calls `glake_vote_asked` until it is asked or
// the shrink has ended, and votes.
int32_t glake_vote_arrive(uint64_t use);

// Waits at most `timeout_ms` until a use that has arrived to vote is asked for its vote. Returns 1 if it is asked, and all work of the
// parked uses has completed; 0 if not yet; -1 if no shrink waits for it any more.
int32_t glake_vote_asked(uint64_t use,
                         int64_t timeout_ms);

// Votes for a use that has arrived to vote. A yes, once asked, lets its memory move, and the thread waits with `glake_safepoint_go_on`
// until it is back. After a no the thread continues at once, the shrink ends with `GLAKE_CLOSED`, nothing has moved, and the use is not
// parked again for five seconds. Returns 1 if the vote counts. 0 for a yes: the use is not being asked, and `glake_vote_asked` tells
// whether the shrink has ended or the vote is too early. 0 for a no: the use had agreed before, and the thread waits with
// `glake_safepoint_go_on`.
int32_t glake_vote_cast(uint64_t use,
                        bool yes);

// Adds a thread to a use: the use is parked only when this thread is at a safe point too. Ended by `glake_use_leave` or with the use.
//
// Does nothing in a forked child and at the end of the process. `GLAKE_CLOSED`: the use is parked now, and the thread was not added: it
// should begin its own use. `GLAKE_INVALID`: no such use.
int32_t glake_use_join(uint64_t use);

// Removes a thread from a use that it joined. Does nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: no such use.
int32_t glake_use_leave(uint64_t use);

// Returns the state of the gate as a JSON object: "open", "uses" (number of open uses), "parked" (number of these waiting at safe points),
// "closing" (pending evictions: arrays of tags, null for everything), "closed" (tags of regions with evicted memory). Null on failure;
// free it with `glake_string_free`.
char *glake_gate_json(void);

// Pins host memory, so that every GPU copies from and to it at full speed, for programs without a CUDA runtime. The range begins and ends
// on page boundaries.
//
// # Safety
// The range belongs to the caller, and stays mapped until it is unpinned.
int32_t glake_host_register(void *start,
                            size_t size);

// Unpins memory pinned by `glake_host_register`. Does nothing in a forked child and at the end of the process.
//
// # Safety
// No copy from or to it is in progress.
int32_t glake_host_unregister(void *start);

// Creates a stream of a device that does not synchronise with the legacy default stream.
//
// # Safety
// `out` is null or may be written.
int32_t glake_stream_create(int32_t device, void **out);

// Waits on the host until the work of a stream is complete. The device may be -1: that of the stream, or the calling thread's current
// device for a default stream.
//
// # Safety
// `stream` is null or a stream of the device.
int32_t glake_stream_synchronize(int32_t device,
                                 void *stream);

// Destroys a stream of `glake_stream_create`; its work still completes. Does nothing in a forked child and at the end of the process.
int32_t glake_stream_destroy(int32_t device,
                             void *stream);

// Sets the lease of a device, a bound on the memory created for this process beside its limit; `GLAKE_LEASE_NONE`: no lease, as before the
// first call. If more memory is held already, nothing is created until it fits again. Extent sizes and stitching are as without a lease.
//
// An allocation above the lease is reported as `GLAKE_LEASE_GROW`, waits for a grant for up to `lease.grow_timeout_ms`, and then fails
// with out of memory. A refill proceeds as grants arrive. A shrink lowers the lease by the bytes that it returns.
int32_t glake_lease_set(int32_t device,
                        uint64_t bytes);

// Adds to a device's lease. 0 denies pending requests: threads that wait for a grant give up.
//
// `GLAKE_INVALID`: the device has no lease.
int32_t glake_lease_grant(int32_t device, uint64_t bytes);

// Lowers a device's lease by its unused part and by free memory, which is released for it: by at most `bytes`, without waiting. `given`,
// if not null, receives the number of bytes.
//
// # Safety
// `given` is null or may be written.
int32_t glake_lease_take(int32_t device,
                         uint64_t bytes,
                         uint64_t *given);

// Calls `watcher` for requests and returns of leases; null ends that, also in a forked child and at the end of the process. There is at
// most one watcher; without one no call waits for grants. The watcher runs on the thread that caused the event, with no lock held except
// those of regions being moved. It may call `glake_lease_set`, `_grant` and `_take`, and must neither move regions nor wait.
//
// # Safety
// The watcher may be called on any thread with this context for the life of the process.
int32_t glake_lease_watch(LeaseWatcher watcher,
                          void *context);

// Joins the agent at socket `agent` under `name`: from then on the agent grants the memory that may be created, beginning with the memory
// held now. `agent` null: the socket of `agent.socket` (`GLAKE_AGENT`), else the user's default socket. `name` null: the program's name
// and process id. Ranks of a launcher (`RANK`, `WORLD_SIZE`) are called `name/RANK` and receive memory together. The call waits up to 5
// seconds for the agent's answer, and as long for a refusal whose reason may pass. Joining again with the same arguments is no error. A
// process that already holds memory thereby reports that its load is complete: from then on its memory may be evicted between uses.
//
// `GLAKE_UNAVAILABLE`: no trusted agent answers, or the agent refuses this process; the text says why. `GLAKE_INVALID`: the name is
// invalid, or this process has joined another agent or under another name: with `GLAKE_AGENT` it joins by itself when its first pool
// starts. Nothing has changed then.
//
// # Safety
// Each is null or a text that ends with a zero.
int32_t glake_join(const char *name,
                   const char *agent);

// Returns whether this process joins an agent by itself with its first pool, because `agent.socket` or `GLAKE_AGENT` names one. False
// before the process has started (`glake_started`).
bool glake_joins_agent(void);

// Disconnects from the agent: only the limits bound this process from then on. Does nothing without an agent, in a forked child, and at
// the end of the process.
int32_t glake_leave(void);

// Returns the version of this library.
const char *glake_version(void);

// Returns the number of this interface, which is raised when a structure or a signature changes.
uint32_t glake_abi(void);

// Sets the configuration before the first use: a preset's name or null, the path of a TOML file or null (then the file that GLAKE_CONFIG
// names), and TOML text that overrides the environment, or null. All of it is checked at once.
//
// `GLAKE_INVALID`: already started, or an error in the configuration, with its line; nothing was changed.
//
// # Safety
// Each is null or a text that ends with a zero.
int32_t glake_configure(const char *preset,
                        const char *file,
                        const char *overrides);

// Opens the devices now instead of at first use; a pool still starts when its device is first used. A failed start is retried by the next
// call.
int32_t glake_start(void);

// Returns whether the devices are open; false in a forked child.
bool glake_started(void);

// Returns the number of devices.
//
// # Safety
// `count` is null or may be written.
int32_t glake_device_count(int32_t *count);

// Returns the kind of the devices: "cuda", or "sim:" and the model; null before the start.
const char *glake_device_name(void);

// Begins to copy `bytes` bytes of a live block, from `pointer` on, to pinned host memory, after the work enqueued on `stream` so far
// (null, 1 and 2 are the default streams of the block's device). `id` receives their number until `glake_offload_release`; it is above 0,
// and never reused. The block may be freed at once: its stream may reuse the memory, behind a wait on the GPU for the copy if there is no
// other memory. Until it is freed, the bytes must not be written before the copy is complete. The call does not wait on the host, except
// to pin memory if none is free. 0 bytes are no error, wherever they lie.
//
// `GLAKE_OUT_OF_MEMORY`: no host memory. `GLAKE_UNSUPPORTED`: the memory does not belong to this library, or belongs to a private pool
// (`glake_is_private`), or the stream is captured, or of another context. In each case the bytes stay on the GPU. `GLAKE_INVALID`: the
// bytes lie in no live block, or were decommitted.
//
// # Safety
// `id` is null or may be written; null is refused.
int32_t glake_offload_begin(const void *pointer,
                            uint64_t bytes,
                            void *stream,
                            uint64_t *id);

// Begins an offload like `glake_offload_begin`, with a check for later writes. When the block is freed, the bytes are copied again to the
// same host memory, so that a reload returns the bytes as of the free, whatever wrote to them meanwhile. From then on
// `glake_offload_check` reports for `save` whether they had changed. `save` is a number that a site (`glake_offload_site_create`) gives to
// one of its saves in each pass. If a required second copy failed twice, the reload reports it: `GLAKE_DRIVER`.
//
// # Safety
// The conditions of `glake_offload_begin` hold.
int32_t glake_offload_begin_checked(const void *pointer,
                                    uint64_t bytes,
                                    void *stream,
                                    uint64_t site,
                                    uint64_t save,
                                    uint64_t *id);

// Returns the state of a save of a site. `state`: 0 if the save is to be checked, as in its first two offloads; 1 if its bytes did not
// change during the check; 2 if they changed without notice: they should stay on their GPU.
//
// # Safety
// `state` is null or may be written; null is refused.
int32_t glake_offload_check(uint64_t site,
                            uint64_t save,
                            int32_t *state);

// Begins to copy offloaded bytes `id` back into a live block of the same device, after the copy out and after the work enqueued on
// `stream` so far, which may have used the block's memory. The bytes must not be read or written before a stream waits:
// `glake_offload_wait`. May be called any number of times. If the block is freed before, its memory is not reused until the copy is
// complete.
//
// `GLAKE_INVALID`: no bytes are offloaded under `id`, or the destination does not lie in one live block, or on another device.
// `GLAKE_UNSUPPORTED`: as for `glake_offload_begin`. `GLAKE_DRIVER`: also if bytes were lost on their way out, with a GPU.
int32_t glake_offload_reload(uint64_t id,
                             void *pointer,
                             void *stream);

// Makes a stream wait, on its GPU, for the latest copy begun by `glake_offload_reload` under `id`; any stream, any number of times.
//
// `GLAKE_INVALID`: no bytes are offloaded under `id`, or no reload was begun.
int32_t glake_offload_wait(uint64_t id,
                           void *stream);

// Forgets the bytes offloaded under `id`; copies in progress continue. Their host memory is reused after them, without a wait. Does
// nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: released before, or never given.
int32_t glake_offload_release(uint64_t id);

// Pins host memory for `bytes` bytes to be offloaded from a device, beside the memory in use: call it ahead, on another thread.
//
// `GLAKE_OUT_OF_MEMORY`: not enough host memory, and none was pinned; or the driver refused a part, and the memory pinned by then stays.
int32_t glake_offload_prepare(int32_t device,
                              uint64_t bytes);

// Checks whether pinned host memory for copies to a device can be had for `bytes` bytes, while `freed` bytes of other memory of the process
// are freed. Pins nothing.
//
// `GLAKE_OUT_OF_MEMORY`: it cannot; the text says how much there is. `GLAKE_INVALID`: no such device.
int32_t glake_offload_room(int32_t device,
                           uint64_t bytes,
                           uint64_t freed);

// Reserves contiguous pinned host memory of `bytes` bytes for copies to a device, until `glake_offload_release`. `id` receives its number,
// for `glake_offload_host`, `glake_offload_reload`, `glake_offload_wait` and `glake_offload_store`. The contents are undefined. Waits only
// to pin memory if none is free.
//
// `GLAKE_OUT_OF_MEMORY`: no host memory. `GLAKE_INVALID`: no such device.
//
// # Safety
// `id` is null or may be written; null is refused.
int32_t glake_offload_reserve(int32_t device,
                              uint64_t bytes,
                              uint64_t *id);

// Begins to copy bytes of a live block, from `pointer` on, into the host memory reserved under `id`, after the work enqueued on `stream` so
// far and after the last reload. The block may be freed at once. Until it is freed, the bytes must not be written before the copy is
// complete.
//
// `GLAKE_INVALID`: `id` is unknown or of offloaded bytes, or the bytes do not lie in one live block of the same device.
// `GLAKE_UNSUPPORTED`: as for `glake_offload_begin`. After another error the block still has the bytes, and the reserved memory may not.
int32_t glake_offload_store(uint64_t id,
                            const void *pointer,
                            void *stream);

// Waits on the host until the copies of the host memory reserved under `id` are complete. `host` receives its address, which is the same
// until the release: the host may read and write the bytes until the next copy begins.
//
// `GLAKE_INVALID`: `id` is unknown or of offloaded bytes. `GLAKE_DRIVER`: also if the last store failed.
//
// # Safety
// `host` is null or may be written; null is refused.
int32_t glake_offload_host(uint64_t id,
                           void **host);

// Sets the weights of a site's program that stream, each a range that comes to the GPU as a whole: `bytes` has the size of each, and
// `blocks` the number of the block that uses it, in the order of a forward. They are all away, and earlier ones are forgotten.
//
// `GLAKE_INVALID`: no such site, or a null list.
//
// # Safety
// `bytes` and `blocks` may be read `count` times.
int32_t glake_offload_stream(uint64_t site,
                             const uint64_t *bytes,
                             const uint32_t *blocks,
                             size_t count);

// Reports the use of a streamed weight, by its number in `glake_offload_stream`. `phase`: 0 a forward without gradients, 1 a forward with
// gradients, 2 a backward. `first`: a new forward begins with it; the caller has freed all copies on the GPU before. `places` receives
// first `left` numbers of weights whose copies on the GPU are to be freed, then `begun` numbers of weights to reload, in this order.
//
// `GLAKE_INVALID`: no such site, weight or phase, or more numbers than `room`, which is enough with twice the number of weights.
//
// # Safety
// `places` may be written `room` times; `left` and `begun` may be written, or are null, which is refused.
int32_t glake_offload_used(uint64_t site,
                           size_t place,
                           int32_t phase,
                           bool first,
                           uint32_t *places,
                           size_t room,
                           size_t *left,
                           size_t *begun);

// Returns whether an owner accounts for the memory at an address: it belongs to a private pool, or to no live block, such as memory that a
// graph tree manages. Such memory is not offloaded, and must not be freed, moved or replaced on the owner's behalf. False for memory that
// does not belong to this library.
//
// # Safety
// `is_private` is null or may be written; null is refused.
int32_t glake_is_private(const void *pointer,
                         bool *is_private);

// Returns a number for the lifetime of the live block that contains an address: constant until the block is freed, and unique on its
// device.
//
// `GLAKE_INVALID`: the address lies in no live block. `GLAKE_UNSUPPORTED`: the memory does not belong to this library.
//
// # Safety
// `generation` is null or may be written.
int32_t glake_generation(const void *pointer,
                         uint64_t *generation);

// Returns the statistics of offloading as a JSON object. Null on failure; free it with `glake_string_free`.
char *glake_offload_stats_json(void);

// Creates an offload site. From each pass, a site learns the order in which packed items are read, and says when reloads begin. A pass
// begins with the first packed item and ends when all packed items are dropped. `site` receives its number, which is above 0, and never
// reused.
//
// # Safety
// `site` is null or may be written; null is refused.
int32_t glake_offload_site_create(uint64_t *site);

// Forgets a site with everything that it learned. Does nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: released before, or never created.
int32_t glake_offload_site_release(uint64_t site);

// Sets the goal of a site's plans, from its next pass on. `preset`: 0 the least time under the budget, 1 the least memory without
// recomputation (the default), 3 like 0, but leaves of a recomputed layer may be stored one by one. `budget`: the most GPU memory of the
// process, contexts included, in bytes; 0: no bound.
//
// `GLAKE_INVALID`: no such site, device or preset.
int32_t glake_offload_ask(uint64_t site,
                          int32_t device,
                          uint64_t budget,
                          int32_t preset);

// Returns whether a forward that is about to begin has to report its saves. It need not if the plan for a pass of the same `shape` keeps
// everything, the room in memory is unchanged, and the budget was not exceeded since. A shape is a number chosen by the caller, the same
// for all forwards that save the same.
//
// `GLAKE_INVALID`: no such site, or a pass with the same earlier forwards exceeded its budget; the text says how much it needs.
//
// # Safety
// `needs` is null or may be written; null is refused.
int32_t glake_offload_needs(uint64_t site,
                            uint64_t shape,
                            bool *needs);

// Returns a site's goal, its latest plan and its passes as a JSON object (docs/METRICS.md); with `course` also the planned pass step by
// step. Null on failure; free it with `glake_string_free`.
char *glake_offload_site_json(uint64_t site,
                              bool course);

// Reports the next bytes that a pass saves, each range once. `item` receives their number in the pass, from 0 on. `verdict`: 0 they stay,
// 1 they are to be offloaded, 2 they need not be stored because their layer recomputes them (only for leaves; such an item is never
// dropped). `begin` has room for `room` items and receives those whose reloads should begin first, in this order; `count` their number.
// Items that find no room come with the site's next call.
//
// `GLAKE_INVALID`: no such site, or no such `leaf`.
//
// # Safety
// `pack` may be read, and `item`, `verdict` and `count` may be written, or are null, which is refused; `begin` may be written `room`
// times.
int32_t glake_offload_packed(uint64_t site,
                             const glake_pack *pack,
                             uint64_t *item,
                             int32_t *verdict,
                             uint64_t *begin,
                             size_t room,
                             size_t *count);

// Begins the computation of a leaf, which ends when its output is packed: the site measures the cost of its recomputation, on the stream
// that the pass began on.
//
// `GLAKE_INVALID`: no such site.
int32_t glake_offload_leaf_begins(uint64_t site);

// Excludes the current pass from time measurements: it computes more than later passes, to compare results with the stored ones.
//
// `GLAKE_INVALID`: no such site.
int32_t glake_offload_untimed(uint64_t site);

// Marks the beginning (`begins`) or the end of a layer's recomputation, on the stream that the pass began on. Reloads to begin come with
// the next call that returns any.
//
// `GLAKE_INVALID`: no such site.
int32_t glake_offload_replays(uint64_t site,
                              uint32_t scope,
                              bool begins);

// Reports a read of an item of the pass, the first or a repeated one. `begin`, `room` and `count` as for `glake_offload_packed`.
//
// `GLAKE_INVALID`: no such site, or its pass has no such item.
//
// # Safety
// `count` may be written, or is null, which is refused; `begin` may be written `room` times.
int32_t glake_offload_unpacked(uint64_t site,
                               uint64_t item,
                               uint64_t *begin,
                               size_t room,
                               size_t *count);

// Reports that the reloaded copy of an item was freed on its GPU, while the item may be read again.
//
// `GLAKE_INVALID`: no such site.
int32_t glake_offload_freed(uint64_t site, uint64_t item);

// Reports that an item will not be read any more. Does nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: no such site, or its pass has no such item.
int32_t glake_offload_dropped(uint64_t site,
                              uint64_t item);

// Creates a private pool on a device, or adds an owner to it. Pools are named by two numbers, as torch's MempoolId_t.
int32_t glake_pool_create(int32_t device,
                          uint64_t first,
                          uint64_t second);

// Routes allocations on streams that the filter accepts (null: every stream), of any thread, to a private pool from now on; the pool is
// created if it does not exist. It adds an owner, which `glake_pool_release` removes. If several pools accept a stream, the one begun last
// serves it. `drop`, if not null, is called once when the filter is no longer needed, also if this call fails.
//
// Call it before a stream capture begins: from then on no completion point is recorded on any device, which would break the capture, until
// `glake_pool_end`, or until an allocation for the pool arrives on a stream that is not capturing. If an allocation was seen in a capture,
// the end of the capture ends this state, even if the capture fails. A capture that failed without allocations ends it with the end of the
// calling thread, or with that thread's next allocation on the device outside of a capture. A pool can then be begun again without
// `glake_pool_end`.
//
// # Safety
// `filter` and `drop` may be called on any thread with this context, and do not call back into the library.
int32_t glake_pool_begin(int32_t device,
                         uint64_t first,
                         uint64_t second,
                         glake_stream_filter filter,
                         void *context,
                         glake_context_drop drop);

// Names the stream on which the capture announced by `glake_pool_begin` will begin. Allocations of the same thread on streams outside of
// the capture then no longer indicate that there is no capture.
int32_t glake_pool_expect_capture(int32_t device,
                                  uint64_t first,
                                  uint64_t second,
                                  void *stream);

// Ends the routing begun by `glake_pool_begin`; the pool and its owners stay. Does nothing in a forked child and at the end of the
// process.
int32_t glake_pool_end(int32_t device,
                       uint64_t first,
                       uint64_t second);

// Removes an owner of a pool. With the last owner the pool is given up: its memory is released once its blocks are freed and all work
// enqueued before is complete. Does nothing in a forked child and at the end of the process.
int32_t glake_pool_release(int32_t device,
                           uint64_t first,
                           uint64_t second);

// Returns the number of owners of a pool; 0 if it does not exist, in a forked child, and at the end of the process.
//
// # Safety
// `count` is null or may be written.
int32_t glake_pool_use_count(int32_t device,
                             uint64_t first,
                             uint64_t second,
                             int32_t *count);

// Releases the free memory of a private pool, for `torch.cuda.MemPool`; not for the pool of a graph that may be replayed. Does nothing in
// a forked child and at the end of the process.
int32_t glake_pool_trim(int32_t device,
                        uint64_t first,
                        uint64_t second);

// Keeps all memory of the private pools with this number on their GPUs, on every device, memory that is made later and free memory too, or
// reverts one earlier call; that does nothing in a forked child and at the end of the process. The pools need not exist yet: fix the pool
// of a graph before its capture, because NCCL registers buffers of captured collectives by their physical memory.
//
// `GLAKE_INVALID`: part of a pool is evicted, or it was not fixed.
int32_t glake_pool_fix(uint64_t first,
                       uint64_t second,
                       bool fixed);

// Calls `visit` for each live block of a private pool.
//
// # Safety
// `visit` may be called with this context, and does not call back into the library.
int32_t glake_pool_blocks(int32_t device,
                          uint64_t first,
                          uint64_t second,
                          glake_block_visit visit,
                          void *context);

// Records which blocks of a private pool are live, as torch's getCheckpointState does; release the record with `glake_checkpoint_drop`.
//
// # Safety
// `out` is null or may be written.
int32_t glake_pool_checkpoint(int32_t device,
                              uint64_t first,
                              uint64_t second,
                              glake_checkpoint **out);

// Restores a private pool to a checkpoint, as torch's setCheckpointPoolState does: blocks live now are freed, and blocks live then are
// live again at the same addresses. `freed` is called for each block that was live before, `allocated` for each that is live now; both for
// a block that stays. No byte is written and no stream waits. Either may be null.
//
// `GLAKE_INVALID`: the pool was released, or memory of those blocks was released since; nothing was changed.
//
// # Safety
// The checkpoint is null or alive; the functions may be called with this context, and do not call back into the library.
int32_t glake_pool_restore(const glake_checkpoint *checkpoint,
                           glake_block_freed freed,
                           glake_block_visit allocated,
                           void *context);

// Releases a checkpoint; null is no error.
//
// # Safety
// The checkpoint is null or alive, and not used again.
void glake_checkpoint_drop(glake_checkpoint *checkpoint);

// Defines a region with this tag, on every device where memory is allocated in it. Repeating the same definition is no error. `host_copy`
// may include `GLAKE_HOST_COPY_CLEAN`.
//
// `GLAKE_INVALID`: a region with this tag and another policy exists; the tag is "default" or begins with "graph ".
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_define(const char *tag,
                            uint32_t policy,
                            uint32_t host_copy);

// Takes back one `glake_region_define` of this tag. Once more than 256 regions have no definition left, those of them without live blocks
// are forgotten: their tags are unknown then, and their memory is released. Does nothing in a forked child and at the end of the process.
//
// `GLAKE_INVALID`: no such region, or it was released as often as it was defined.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_release(const char *tag);

// Makes the calling thread allocate from this region from now on, except for allocations that a private pool takes. Entries nest.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_push(const char *tag);

// Leaves the region that the calling thread entered last. Does nothing in a forked child and at the end of the process.
int32_t glake_region_pop(void);

// Makes the calling thread allocate plain memory from now on (`cuMemAlloc`), also for private pools: it has a legacy IPC handle
// (`cudaIpcGetMemHandle`), and `cuMemGetAddressRange` returns its whole allocation. It counts like the pool's other memory, never leaves
// its GPU, and is neither stitched, shared by `glake_share` nor offloaded. Entries nest; a region that is entered later takes precedence.
// Does not start the library: before the start, it takes effect once the same thread starts it.
int32_t glake_plain_push(void);

// Reverts the calling thread's last `glake_plain_push`. Does nothing in a forked child and at the end of the process.
int32_t glake_plain_pop(void);

// Promises not to write to the bytes of a region until it is unsealed; the region serves no allocations meanwhile. With `strict` its
// memory is mapped read-only, which waits until no use of it runs.
//
// `GLAKE_INVALID`: its policy is not `GLAKE_POLICY_SEALED`.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_seal(const char *tag,
                          bool strict);

// Ends the seal of a region: its bytes may change again; retained copies of them are released.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_unseal(const char *tag);

// Pins host memory for a region's live bytes ahead, if the region was defined with `GLAKE_HOST_COPY_PREPARE`.
//
// # Safety
// `tag` is null or a text that ends with a zero.
int32_t glake_region_prepare(const char *tag);

// Fixes the memory of the block that contains an address on its GPU, or ends that; ending it does nothing in a forked child and at the end
// of the process.
int32_t glake_region_fix(const void *pointer,
                         bool fixed);

// Refills the evicted memory of a region on a device before later work of a stream: work enqueued after this call finds it.
//
// # Safety
// `tag` is null or a text that ends with a zero; `stream` is null or a stream of the device.
int32_t glake_region_wait(const char *tag,
                          int32_t device,
                          void *stream);

// Sets the order in which regions are refilled. Other regions follow, in the order of their first allocations.
//
// # Safety
// `tags` may be read for `count` texts that end with zeros.
int32_t glake_region_order(const char *const *tags,
                           size_t count);

// Returns the tag of the region of a block, to be freed with `glake_string_free`; null if the block is in no region or the pointer is no
// block, without a change of `glake_last_error`.
char *glake_region_of(const void *pointer);

// Returns every region on every device as a JSON array: "tag", "policy", "host_copy", "sealed", "device" (null: no allocation yet); in
// bytes "resident", "evicted", "decommitted" (memory released, addresses kept) and "live"; "place" (of most of the evicted bytes),
// "places" (bytes by place); "clean" (null: idle memory is not copied ahead; in bytes "now", with a copy, and so far "copied", "voided" by
// uses, allocations and copies, "released" without another copy, "refused" because they had changed outside of any use, "reclaimed" for
// others); "predicted_refill_seconds". Memory outside of regions is "default", memory of private pools "graph (a, b)". Null on failure;
// free it with `glake_string_free`.
char *glake_regions_json(void);

// Declares the live bytes of the block that begins at `pointer` as half-open ranges. Only they, rounded out to 512 bytes, are copied when
// the memory is evicted; all other bytes are undefined after the refill. `ranges` null: all bytes are live again. `count` 0 with `ranges`
// not null: none are. Holds until the next call for the block, or until it is freed; for evicted memory, from the next eviction on.
//
// Declare every byte that may still be read, including free entries that may be hit again, such as a cache's hashed blocks.
//
// `GLAKE_INVALID`: no block begins there, or a range exceeds the block; the earlier ranges hold.
//
// # Safety
// `ranges` is null or may be read for `count` ranges.
int32_t glake_live_ranges(const void *pointer,
                          const glake_byte_range *ranges,
                          size_t count);

// Declares the live bytes of a block by a callback, which every shrink that evicts the block calls anew: it calls `add` with `into` for
// each range, and returns 0. It runs on a thread of the library, with no lock held, once the uses of the block's memory have ended or are
// parked and all GPU work has completed. If it returns another value, names a range that exceeds the block, or takes longer than hooks may
// (without hooks, `tiers.drain_timeout_ms`; all callbacks of a shrink together), all bytes are live, and the report contains a warning.
// `drop`, if not null, is called once when `callback` will not be called again: some time after the block was freed or other ranges were
// declared, and at once if this call fails.
//
// `GLAKE_INVALID`: no block begins there, or `callback` is null.
//
// # Safety
// `callback` and `drop` may be called on any thread with this context, until `drop` was called.
int32_t glake_live_callback(const void *pointer,
                            glake_live_callback_function callback,
                            void *context,
                            glake_context_drop drop);

// Gives work on `device` access to the pool memory of `peer`, present and future.
int32_t glake_enable_peer(int32_t device, int32_t peer);

// Exports the block that contains an address to other processes of the same user, until it is freed: a handle of at most `capacity` bytes,
// its length, and the offset of the address in the opened memory. An opener maps whole extents and can therefore see other data in them. A
// handle takes some tens of bytes and a few more for each extent; if `capacity` is too small, `length` receives the required size.
//
// # Safety
// `handle` is null or may be written for `capacity` bytes; `length` and `offset` are null or may be written.
int32_t glake_share(const void *pointer,
                    uint8_t *handle,
                    size_t capacity,
                    size_t *length,
                    uint64_t *offset);

// Opens memory shared by another process, for work on a device and on devices with access to its pool memory. Opening the same handle
// again gives the same address. The exporting process must live and keep the block until this call returns.
//
// # Safety
// `handle` is null or may be read for `length` bytes; `base` is null or may be written.
int32_t glake_open_shared(const uint8_t *handle,
                          size_t length,
                          int32_t device,
                          void **base);

// Closes one use of memory opened by `glake_open_shared`. The last close unmaps it after all work enqueued before; the call waits for that
// work, or defers the unmapping while a capture is open. Does nothing in a forked child and at the end of the process.
int32_t glake_close_shared(void *base);

// Evicts memory from GPUs; blocks keep their addresses and, except in regions with `GLAKE_POLICY_DISCARD`, their bytes. `request` is null
// (everything, to the host) or a JSON object: "tags" (an array; absent: everything, including memory outside of regions and private
// pools), "bytes" (at least this many, the cheapest first; absent: all), "tier" ("host", "peer", "peer:1", "file"), "verify", "timeout_ms"
// (for running uses to end).
//
// The call waits for running uses of the memory (`glake_use_begin`), and holds new ones until it is back. A program without gate calls
// must enqueue no work on the evicted memory until it is refilled. Allocations and copies by other threads that touch it refill it.
//
// The report is a JSON object, to be freed with `glake_string_free`. In bytes: "freed", "copied", "clean" (evicted without a copy because
// an earlier one was valid), "undefined" (not live, and not copied), "resident". "regions": an array of "tag", "device", the same in
// bytes, "evicted" (total now evicted), "place" (destination of this shrink) and "skipped": an array of "device",
// "address", "size", "reason", one of "fixed", "exported", "withheld". "skipped": if everything was to be evicted, memory outside of
// regions that had to stay, with the reason "imported". "warnings": texts about live callbacks without an answer, and about GPUs that do
// not report their memory usage. "gpu": an array of "device" (null for the host), "holder", "bytes". "seconds",
// "predicted_refill_seconds". Null on failure (`glake_last_status` gives the status, `glake_last_error` the part evicted by then): no
// bytes are lost, and a repeated call continues from there.
//
// # Safety
// `request` is null or a text that ends with a zero.
char *glake_shrink(const char *request);

// Refills evicted memory at its addresses. `request` is null (everything) or a JSON object: "tags", "bytes", "verify" as for
// `glake_shrink`; "wait" (false: the refill continues in the background, and the report is empty); "timeout_ms" (of the wait; absent:
// none).
//
// The report is a JSON object, to be freed with `glake_string_free`: "mapped", "copied", "evicted" (still evicted) in bytes, "regions" (an
// array of "tag", "device", "mapped", "copied", "resident", "evicted"), "seconds". Null
// on failure, as for `glake_shrink`. `GLAKE_TIMEOUT`: the timeout has expired, and the refill continues in the background.
//
// # Safety
// `request` is null or a text that ends with a zero.
char *glake_refill(const char *request);

// Returns the memory usage of each GPU by holder, as a JSON array of "device", "holder" and "bytes", like "gpu" in the report of a shrink.
// Null on failure; free it with `glake_string_free`.
char *glake_memory_usage_json(void);

// Sets hooks that run before and after every requested shrink and refill; null: none. The event is a JSON object: "event" ("shrink",
// "refill"), "when" ("before", "after"), "tags", "bytes", and after it "report" or "error". Hooks run on threads of their own, and the
// call waits for them up to `timeout_ms` (-1: no timeout). If `before` returns a value other than 0, or takes longer, nothing is moved.
// Refills on access are reported too ("touched": true, "device"), without a wait. Replaces the earlier hooks; removing them succeeds in a
// forked child and at the end of the process too.
//
// # Safety
// The hooks may be called on any thread with this context for the life of the process.
int32_t glake_hooks_set(glake_hook before,
                        glake_hook after,
                        void *context,
                        int64_t timeout_ms);

// Returns the statistics of a device; zeros if its pool has not started.
//
// # Safety
// `out` is null or may be written.
int32_t glake_stats(int32_t device, glake_device_stats *out);

// Resets the peaks of a device to the current values.
int32_t glake_reset_peaks(int32_t device);

// Resets the totals and event counters of a device to zero.
int32_t glake_reset_totals(int32_t device);

// Returns the statistics as a JSON object: torch's flat keys ("active_bytes.all.peak"), and GLake's under "glake.". Null on failure; free
// it with `glake_string_free`.
char *glake_stats_json(int32_t device);

// Frees a text returned by this library; null is no error.
//
// # Safety
// The pointer is null, or such a text, and not used again.
void glake_string_free(char *text);

// Returns the number of driver calls that the library has made, on all threads and devices, and the microseconds that they took on the
// host. Either may be null.
//
// # Safety
// Both are null or may be written.
int32_t glake_driver_calls(uint64_t *calls,
                           uint64_t *microseconds);

// Returns the number of heap allocations that the library has made.
uint64_t glake_heap_allocations(void);

// Returns the state of all pools in the form of torch's `_cuda_memorySnapshot`, as JSON. Null on failure; free it with
// `glake_string_free`.
char *glake_snapshot_json(void);

// Calls `segment` for every mapped range of a device, each followed by `block` for its parts. Either may be null.
//
// # Safety
// The functions may be called with this context, and do not call back into the library.
int32_t glake_segments(int32_t device,
                       glake_segment_visit segment,
                       glake_segment_block_visit block,
                       void *context);

// Starts or stops the event history for snapshots: the last `max_entries` events are kept. `clear` forgets earlier ones.
int32_t glake_record_history(bool enabled,
                             uint64_t max_entries,
                             bool clear);

// Returns whether events are recorded.
bool glake_history_enabled(void);

// Calls `observer`, on the requesting thread, before a request is refused for lack of memory; null ends that, also in a forked child and
// at the end of the process. There is at most one observer.
//
// # Safety
// The observer may be called on any thread with this context for the life of the process, and calls no function of the library except
// `glake_stats`.
int32_t glake_on_out_of_memory(glake_out_of_memory_observer observer,
                               void *context);

// Calls `observer`, on the thread at hand, for memory that was mapped or is about to be unmapped; null ends that. There is at most one
// observer.
//
// # Safety
// The conditions of `glake_on_out_of_memory` hold.
int32_t glake_on_mapping(glake_mapping_observer observer,
                         void *context);

// Returns the text of the calling thread's last failed call; empty before the first. Valid until the thread's next failed call.
const char *glake_last_error(void);

// Returns the status of the calling thread's last failed call, for calls that return no status; `GLAKE_OK` before the first.
int32_t glake_last_status(void);

// Returns the same text as `glake_last_error`.
const char *gmlake_last_error(void);

// Allocates a block for work on a stream of the device; null for size 0. On failure it throws std::runtime_error if torch is loaded, else
// returns null; gmlake_last_error says why.
//
// # Safety
// The conditions of `glake_alloc` hold.
void *gmlake_malloc(size_t size,
                    int32_t device,
                    void *stream);

// Frees a block, identified by the pointer alone. A pointer that is no block is logged, and nothing is changed.
void gmlake_free(void *pointer,
                 size_t _size,
                 int32_t _device,
                 void *_stream);

// Opens the devices; throws as gmlake_malloc does. Calling it is optional.
//
// # Safety
// None needed; it is unsafe because it is a jump.
void gmlake_init(int32_t device_count);

// Releases all cached memory: waits for pending frees and releases free memory on all devices. Blocks stay. Throws as gmlake_malloc does.
// Does nothing in a forked child and at the end of the process.
//
// # Safety
// The conditions of `gmlake_init` hold.
void gmlake_reset(void);

// Sets the fraction of a device's memory that may be reserved. Throws as gmlake_malloc does.
//
// # Safety
// The conditions of `gmlake_init` hold.
void gmlake_memory_fraction(double fraction, int32_t device);

// Returns the start of the block that contains an address; null if there is none. `size`, if not null, receives the requested size.
//
// # Safety
// `size` is null or may be written.
void *gmlake_base_alloc(void *ptr,
                        size_t *size);

// Records a use of a block by a stream, as `glake_record_stream`; does nothing if no block of this library begins at the pointer.
//
// # Safety
// The conditions of `glake_record_stream` hold.
void gmlake_record_stream(void *ptr,
                          void *stream);

// Enqueues a copy on a stream of any device (null and 1: the legacy default stream of the calling thread's current device, 2: the thread's
// own). `handle`, if not null, receives the argument of `glake_copy_wait`, or 0 if there is nothing left to wait for.
//
// A copy between host memory and a GPU of at least the break-even size goes over several links if relays are on and ready; any other is
// the driver's own copy. As for `cuMemcpyAsync`, the source must not change, and both ranges stay allocated, until the copy has run.
//
// `GLAKE_DRIVER`: the driver refused, or a GPU was lost that carried parts of earlier copies, whose bytes may not have arrived; this copy
// was not made then.
//
// # Safety
// Both ranges are memory; the destination is not accessed by unordered work until the copy has run; `stream` is a stream; `handle` is null
// or may be written.
int32_t glake_copy_async(void *to,
                         const void *from,
                         size_t size,
                         void *stream,
                         uint32_t flags,
                         uint64_t *handle);

// Waits on the host until a copy is complete, and ends its handle. 0 is no error.
//
// `GLAKE_DRIVER`: the bytes did not arrive, or may not have. `GLAKE_INVALID`: the handle was waited for before, or never given.
int32_t glake_copy_wait(uint64_t handle);

// Ends the handle of a copy without waiting for it: the copy continues, and its outcome is not reported. 0 is no error. Every handle must
// be ended by this call or by `glake_copy_wait`; until then it keeps an event of the driver. Does nothing in a forked child and at the end
// of the process.
//
// `GLAKE_INVALID`: the handle was ended before, or never given.
int32_t glake_copy_drop(uint64_t handle);

// Returns whether a copy is complete; the handle stays. Errors are those of `glake_copy_wait`, which must then still end the handle.
//
// # Safety
// `done` is null or may be written.
int32_t glake_copy_done(uint64_t handle,
                        bool *done);

// Enqueues a list of copies, unordered among themselves: like one `glake_copy_async`, for many small blocks.
//
// # Safety
// `blocks` may be read for `count` blocks; for each, and for the rest, as for `glake_copy_async`.
int32_t glake_copy_list(const glake_copy_block *blocks,
                        size_t count,
                        void *stream,
                        uint32_t flags,
                        uint64_t *handle);

// Enqueues copies of one range of host memory to several GPUs: it is read once, and passed on between them.
//
// # Safety
// `to` may be read for `count` pointers; for each, and for the rest, as for `glake_copy_async`.
int32_t glake_copy_to_all(void *const *to,
                          size_t count,
                          const void *from,
                          size_t size,
                          void *stream,
                          uint32_t flags,
                          uint64_t *handle);

// Tries a copy for callers with a copy function of their own, such as the preload library. Returns 0 if it was enqueued (with
// `GLAKE_COPY_BLOCKING`: completed). Returns 1 if nothing was done: the copy is too small, is not between host and GPU, has not the
// direction that `GLAKE_COPY_TO_GPU` or `GLAKE_COPY_FROM_GPU` asks for, the driver refused before anything was enqueued, or no relays are
// on and ready. Below 0: the driver's own error, negated. Any other value is an error of `glake_copy_async`; after `GLAKE_INVALID`,
// `GLAKE_UNAVAILABLE` and `GLAKE_UNSUPPORTED` nothing was done either.
//
// # Safety
// As for `glake_copy_async`.
int32_t glake_copy_try(void *to,
                       const void *from,
                       size_t size,
                       void *stream,
                       uint32_t flags);

// Returns the GPU whose memory is at an address; -1 for host memory, and for managed memory, which migrates on access.
//
// # Safety
// `device` is null or may be written.
int32_t glake_device_of(const void *at,
                        int32_t *device);

// Allows copies to use the links of the other visible GPUs (1), or ends that (0). The links are prepared in the background, at the cost of
// a context on each GPU; copies use one link until then, and none waits for it. Repeated calls are no error.
//
// `GLAKE_INVALID`: the configuration has `transfer.multi_path = "never"`, or several processes of the program run on this machine and
// it does not say `"always"`.
int32_t glake_multi_path(int32_t on);

// Returns the statistics of copies as a JSON object: relays that are ready and their cost, and for each path its bytes, slices, busy time
// and retries. Null on failure; free it with `glake_string_free`.
char *glake_copy_stats_json(void);

#ifdef __cplusplus
// Torch's signatures with C++ objects by value. Routes allocations on streams that the filter accepts to a private pool;
// throws as gmlake_malloc does.
void gmlake_begin_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> id,
                                   std::function<bool(struct CUstream_st *)> filter);

// Ends the routing of gmlake_begin_allocate_to_pool; a failure is logged.
void gmlake_end_allocate_to_pool(int device, std::pair<unsigned long long, unsigned long long> id);

// Removes an owner of a private pool; a failure is logged.
void gmlake_release_pool(int device, std::pair<unsigned long long, unsigned long long> id);
} // extern "C"
#endif

#endif // GLAKE_GMLAKE_H
