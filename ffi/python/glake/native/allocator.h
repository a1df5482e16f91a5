// torch's CUDA allocator, over the pools of libgmlake.
//
// The short way of allocate and free is the current device, the current stream, one test whether anybody looks, and the library's call.
// All else (history, trackers, profilers, out of memory) is on a second way, out of line.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "exhaustion.h"
#include "history.h"
#include "imports.h"
#include "pools.h"
#include "segments.h"
#include "snapshot.h"
#include "statistics.h"
#include "status.h"
#include "torch.h"

namespace glake {

class Allocator final : public caching::CUDAAllocator {
 public:
  /// The process's one. It is never destroyed: tensors may end after every static object has.
  static Allocator& instance() {
    static auto* allocator = new Allocator;
    return *allocator;
  }

  /// The allocator that was torch's hands out the blocks of pools that bring an allocator of their own.
  void take_the_place_of(caching::CUDAAllocator* native) {
    pools_.take_from(native);
  }

  /// What pools with an allocator of their own hold.
  void foreign(DeviceIndex device, uint64_t& pools, uint64_t& allocated, uint64_t& reserved) {
    known(device);
    pools = foreign_.count(device);
    auto* native = foreign_.native();
    allocated = native == nullptr ? 0 : Statistics::allocated_by(native, device);
    reserved = native == nullptr ? 0 : Statistics::reserved_by(native, device);
  }

  // ---- blocks ----

  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current_device();
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cuda(device)};
    }
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
    if (const auto pool = foreign_pool(device, stream); C10_UNLIKELY(pool != kNoPool)) {
      void* block = take_foreign(device, pool, bytes, stream);
      return {block, block, foreign_.native()->raw_deleter(), cuda(device)};
    }
    void* block = take(device, bytes, stream);
    return {block, block, &release, cuda(device)};
  }

  void* raw_alloc(size_t bytes) override {
    return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()).stream());
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    const DeviceIndex device = current_device();
    if (bytes == 0) {
      return nullptr;
    }
    const auto pool = foreign_pool(device, stream);
    return C10_LIKELY(pool == kNoPool) ? take(device, bytes, stream) : take_foreign(device, pool, bytes, stream);
  }

  void raw_delete(void* block) override {
    release(block);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  using caching::CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr& data, CUDAStream stream) override {
    if (foreign_.owns(data)) {
      foreign_.native()->recordStream(data, stream);
      return;
    }
    // Memory that came from elsewhere (another process, another allocator) keeps itself alive by other means.
    if (data.get() != nullptr && data.get_deleter() == &release) {
      // The handle of a default stream names no device: it is the current one's.
      const bool is_default = stream.stream() == nullptr;
      const c10::cuda::OptionalCUDAGuard current(is_default ? std::optional(stream.device()) : std::nullopt);
      check(glake_record_stream(data.get(), stream.stream()));
    }
  }

  void* getBaseAllocation(void* inside, size_t* size) override {
    glake_block block{};
    if (auto* native = foreign_.native(); native != nullptr && glake_find(inside, &block) != GLAKE_OK) {
      return native->getBaseAllocation(inside, size);
    }
    check(glake_find(inside, &block));
    if (size != nullptr) {
      *size = block.size;
    }
    return block.base;
  }

  // ---- the whole ----

  void init(int device_count) override {
    check(glake_start());
    int32_t found = 0;
    check(glake_device_count(&found));
    TORCH_CHECK(
        found >= device_count, "glake: torch found ", device_count, " CUDA devices, ", glake_device_name(), " has ", found,
        ". Check CUDA_VISIBLE_DEVICES and GLAKE_DEVICE.");
    pools_.init(device_count);
    devices_.store(device_count);
  }

  bool initialized() override {
    return devices_.load() != 0;
  }

  std::string name() override {
    return "glake";
  }

  void enable(bool value) override {
    TORCH_CHECK_NOT_IMPLEMENTED(value, "glake: the pool cannot be switched off. Start the process without glake.enable() instead.");
  }

  bool isEnabled() const override {
    return true;
  }

  void emptyCache(MempoolId_t pool = kNoPool) override {
    if (pool == kNoPool) {
      uint64_t released = 0;
      check(glake_trim(-1, 0, &released));
      if (auto* native = foreign_.native()) {
        native->emptyCache(kNoPool); // What is left of pools that have ended; none that lives is asked for anything.
      }
      return;
    }
    for (DeviceIndex device = 0; device < devices(); ++device) {
      pools_.empty(device, pool);
    }
  }

  double getMemoryFraction(DeviceIndex device) override {
    known(device);
    double fraction = 1.0;
    check(glake_fraction(device, &fraction));
    return fraction;
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    known(device);
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction: ", fraction, ". Please set within [0, 1].");
    check(glake_set_fraction(device, fraction));
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    known(device);
    uint64_t bytes = 0;
    check(glake_largest(device, &bytes));
    *largest = bytes;
  }

  // ---- figures ----

  DeviceStats getDeviceStats(DeviceIndex device) override {
    known(device);
    DeviceStats stats = Statistics(device).torch();
    if (auto* native = foreign_.native()) {
      Statistics::add(stats, native->getDeviceStats(device));
    }
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    known(device);
    check(glake_reset_totals(device));
    if (auto* native = foreign_.native()) {
      native->resetAccumulatedStats(device);
    }
  }

  void resetPeakStats(DeviceIndex device) override {
    known(device);
    check(glake_reset_peaks(device));
    if (auto* native = foreign_.native()) {
      native->resetPeakStats(device);
    }
  }

#if GLAKE_TORCH >= 210
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex) override {
    return {}; // torch's expandable segments: there are none.
  }
#endif

  // ---- history ----

#if GLAKE_TORCH >= 211
  caching::SnapshotInfo snapshot(MempoolId_t pool = kNoPool, bool include_traces = true) override {
    return Snapshot::take(history_, devices(), pool, include_traces, foreign_.native());
  }

  void recordHistory(
      bool enabled,
      caching::CreateContextFn recorder,
      size_t max_entries,
      RecordContext when,
      bool clear,
      const std::vector<std::string>& skip_actions) override {
    uint32_t skipped = 0;
    for (const auto& action : skip_actions) {
      skipped |= 1u << c10::CachingDeviceAllocator::parseTraceEntryAction(action);
    }
    record(enabled, recorder, max_entries, when, clear, skipped);
    if (auto* native = foreign_.listener()) {
      native->recordHistory(enabled, recorder, max_entries, when, clear, skip_actions);
    }
  }
#else
  caching::SnapshotInfo snapshot(MempoolId_t pool = kNoPool) override {
    return Snapshot::take(history_, devices(), pool, true, foreign_.native());
  }

  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear) override {
    record(enabled, recorder, max_entries, when, clear, 0);
    if (auto* native = foreign_.listener()) {
      native->recordHistory(enabled, recorder, max_entries, when, clear);
    }
  }
#endif

  bool isHistoryEnabled() override {
    return history_.enabled();
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    if (history_.enabled()) {
      history_.annotate(current_device(), metadata);
    }
  }

  void pushCompileContext(std::string& metadata) override {
    if (history_.enabled()) {
      History::compile_contexts().push_back(metadata);
    }
  }

  void popCompileContext() override {
    if (!History::compile_contexts().empty()) {
      History::compile_contexts().pop_back();
    }
  }

#if GLAKE_TORCH >= 210
  void setUserMetadata(const std::string& metadata) override {
    History::user_metadata() = metadata;
  }

  std::string getUserMetadata() override {
    return History::user_metadata();
  }
#endif

  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    exhaustion_.attach(std::move(observer));
  }

  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    seed();
    if (auto* native = foreign_.listener()) {
      native->attachAllocatorTraceTracker(tracker);
    }
    history_.attach(std::move(tracker));
  }

  // ---- private pools ----

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter) override {
    known(device);
    pools_.routes().begin(device, pool, std::move(filter));
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    pools_.routes().end(device, pool);
  }

  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    pools_.release(device, pool);
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    return PrivatePools::owners(device, pool);
  }

  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool, ForeignPools::Inner inner = nullptr) override {
    known(device);
    pools_.create(device, pool, inner != nullptr && &*inner == this ? nullptr : std::move(inner));
  }

#if GLAKE_TORCH >= 211
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    known(device);
    pools_.routes().help(device, pool, use);
  }
#else
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    pools_.routes().help(device, pool, true);
  }
#endif

#if GLAKE_TORCH >= 210
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    pools_.no_split(device, pool);
  }
#endif

  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool, const std::unordered_set<void*>& expected) override {
    known(device);
    return pools_.lives(device, pool, expected);
  }

  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex device, MempoolId_t pool) override {
    known(device);
    return pools_.checkpoint(device, pool);
  }

  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    known(device);
    return pools_.restore(device, std::move(state), history_, &release);
  }

  // ---- several devices, several processes ----

  /// Work of `device` may touch memory of `peer` from now on.
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    known(device);
    known(peer);
    {
      const c10::cuda::CUDAGuard guard(device);
      const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0); // for memory that is not the pool's
      if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
      } else {
        C10_CUDA_CHECK(error);
      }
    }
    check(glake_enable_peer(device, peer));
  }

  /// Without access between the devices only the peer form of the call works on mapped memory.
  cudaError_t memcpyAsync(
      void* to,
      int to_device,
      const void* from,
      int from_device,
      size_t bytes,
      cudaStream_t stream,
      bool p2p_enabled) override {
    if (p2p_enabled || to_device == from_device) {
      return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  caching::ShareableHandle shareIpcHandle(void* inside) override {
    glake_block block{};
    if (auto* native = foreign_.native(); native != nullptr && glake_find(inside, &block) != GLAKE_OK) {
      return native->shareIpcHandle(inside);
    }
    return Imports::share(inside);
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    if (auto* native = foreign_.listener(); native != nullptr && !Imports::is_ours(handle)) {
      return native->getIpcDevPtr(std::move(handle));
    }
    return imports_.open(handle, current_device());
  }

 private:
  Allocator() = default;

  static DeviceIndex current_device() {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
  }

  DeviceIndex devices() const {
    return static_cast<DeviceIndex>(devices_.load());
  }

  void known(DeviceIndex device) const {
    TORCH_CHECK(
        0 <= device && device < devices(), "Invalid device argument ", static_cast<int>(device), ": torch has initialized ",
        static_cast<int>(devices()), " CUDA devices");
  }

  bool looked_at() const {
    return history_.watched() || c10::memoryProfilingEnabled() || c10::impl::GPUTrace::get_trace() != nullptr;
  }

  void* take(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    if (C10_UNLIKELY(looked_at())) {
      return take_watched(device, bytes, stream);
    }
    void* block = nullptr;
    const int32_t status = glake_alloc(device, bytes, stream, &block);
    return C10_LIKELY(status == GLAKE_OK) ? block : exhaustion_.recover(status, device, bytes, stream);
  }

  /// The pool with an allocator of its own that an allocation is for, or no pool.
  MempoolId_t foreign_pool(DeviceIndex device, cudaStream_t stream) {
    if (C10_LIKELY(!foreign_.is_open())) {
      return kNoPool;
    }
    const auto pool = pools_.routes().pool_of(device, stream);
    return foreign_.has(device, pool) ? pool : kNoPool;
  }

  /// A block of a pool with an allocator of its own.
  C10_NOINLINE void* take_foreign(DeviceIndex device, const MempoolId_t& pool, size_t bytes, cudaStream_t stream) {
    pools_.routes().served_elsewhere(device, pool, stream);
    try {
      return pools_.foreign().allocate(device, pool, bytes, stream);
    } catch (const c10::OutOfMemoryError&) {
      // What is free of ours may be what is missing.
      if (!Exhaustion::give_back(device)) {
        exhaustion_.tell(device, rounded(bytes));
        throw;
      }
    }
    try {
      return pools_.foreign().allocate(device, pool, bytes, stream);
    } catch (const c10::OutOfMemoryError&) {
      exhaustion_.tell(device, rounded(bytes));
      throw;
    }
  }

  /// The deleter of every block. A free never throws.
  static void release(void* block) {
    if (C10_UNLIKELY(instance().looked_at())) {
      instance().release_watched(block);
    } else if (C10_UNLIKELY(glake_free(block) != GLAKE_OK)) {
      instance().not_ours(block);
    }
  }

  /// libgmlake has refused to free it.
  C10_NOINLINE void not_ours(void* block) noexcept {
    const std::string text = last_error();
    if (!foreign_.release(block)) {
      warn(text);
    }
  }

  C10_NOINLINE void* take_watched(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    const MempoolId_t pool = history_.watched() ? pools_.routes().pool_of(device, stream) : kNoPool;
    Context context = history_.gather(RecordContext::STATE);
    void* block = nullptr;
    {
      const CauseGuard guard(Cause{context, stream, pool});
      const int32_t status = glake_alloc(device, bytes, stream, &block);
      if (status != GLAKE_OK) {
        block = exhaustion_.recover(status, device, bytes, stream);
      }
    }
    history_.began(device, block, Live{std::move(context), stream, pool, bytes});
    report(device, block, static_cast<int64_t>(rounded(bytes)));
    if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
      (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
    }
    return block;
  }

  C10_NOINLINE void release_watched(void* block) noexcept {
    try {
      glake_block found{};
      const bool ours = block != nullptr && glake_find(block, &found) == GLAKE_OK && found.base == block;
      const auto device = static_cast<DeviceIndex>(found.device);
      if (ours) {
        if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) {
          (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
        }
        if (history_.watched()) {
          history_.ends(device, block, history_.gather(RecordContext::ALL));
        }
      }
      if (glake_free(block) != GLAKE_OK) {
        not_ours(block);
      } else if (ours) {
        report(device, block, -static_cast<int64_t>(found.size));
      }
    } catch (const std::exception& error) {
      warn(error.what());
    }
  }

  /// The profiler's view of memory; asked for the figures only while one is on.
  static void report(DeviceIndex device, void* block, int64_t bytes) {
    if (c10::memoryProfilingEnabled()) {
      const Statistics now(device);
      c10::reportMemoryUsageToProfiler(block, bytes, now.allocated(), now.reserved(), cuda(device));
    }
  }

  /// The library mapped or unmapped memory. It holds locks: nothing here calls it.
  static void mapping(void* context, int32_t device, bool mapped, uint64_t address, uint64_t size) noexcept {
    try {
      const Cause cause = History::cause();
      static_cast<Allocator*>(context)->history_.add(
          mapped ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP, static_cast<DeviceIndex>(device), address, size,
          cause.stream, cause.pool, cause.context);
    } catch (const std::exception& error) {
      warn(std::string("a tracker of memory failed: ") + error.what());
    }
  }

  /// Before somebody begins to look: what lives already is remembered, and mappings are heard of.
  void seed() {
    if (!history_.looking()) {
      const int32_t status = glake_on_mapping(&mapping, this);
      if (status != GLAKE_UNSUPPORTED) {
        check(status); // Else the history has no mappings.
      }
      for (DeviceIndex device = 0; device < devices(); ++device) {
        Segments::seed(history_, device);
      }
    }
  }

  void record(bool enabled, caching::CreateContextFn recorder, size_t max_entries, RecordContext when, bool clear, uint32_t skipped) {
    if (enabled) {
      seed();
    }
    history_.record(enabled, recorder, max_entries, when, clear, skipped);
  }

  std::atomic<int> devices_{0};
  PrivatePools pools_;
  const ForeignPools& foreign_ = pools_.foreign();
  History history_;
  Exhaustion exhaustion_{history_, pools_.routes(), foreign_};
  Imports imports_;
};

} // namespace glake
