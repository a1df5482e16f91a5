// Private pools that bring an allocator of their own (torch.cuda.MemPool(allocator)): NCCL's registered memory, vLLM's sleep mode.
//
// Nothing of such a pool is libgmlake's. Its segments come from that allocator and its blocks from torch's native one, as in a program
// without glake: never stitched, lent or shrunk. libgmlake knows the pool by its number only, to hold completion points back while a
// graph is captured in it. The program's allocator is called with no lock of ours held.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "provider.h"
#include "torch.h"

namespace glake {

/// All of them.
class ForeignPools {
 public:
  using Inner = Provider::Inner;
  using Filter = std::function<bool(cudaStream_t)>;

  /// torch's native allocator, which hands the blocks out. Said once, before torch starts.
  void use(caching::CUDAAllocator* native) {
    native_ = native;
  }

  void init(int devices) {
    if (native_ != nullptr && !native_->initialized()) {
      native_->init(devices);
    }
  }

  /// Who hands the blocks of such pools out, or null while there has never been such a pool.
  caching::CUDAAllocator* native() const {
    return any_.load(std::memory_order_acquire) ? native_ : nullptr;
  }

  /// Who has to hear of trackers and of the history before such a pool comes, or null.
  caching::CUDAAllocator* listener() const {
    return native_ != nullptr && native_->initialized() ? native_ : nullptr;
  }

  /// Whether some allocation may be for such a pool now: all that the short way asks.
  bool is_open() const {
    return open_.load(std::memory_order_relaxed) != 0;
  }

  bool has(DeviceIndex device, const MempoolId_t& pool) const {
    return provider_of(device, pool) != nullptr;
  }

  /// How many there are on a device.
  size_t count(DeviceIndex device) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(pools_.begin(), pools_.end(), [&](const auto& pool) { return pool.first.first == device; });
  }

  void create(DeviceIndex device, const MempoolId_t& pool, Inner inner) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        listener() != nullptr, "glake: torch.cuda.MemPool was given an allocator of its own, which only torch's native allocator can serve, "
        "and that is not here. Use torch.cuda.MemPool() or glake.mem_pool().");
    auto provider = std::make_shared<Provider>(std::move(inner));
    auto segments = torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
        [provider](size_t bytes, int, cudaStream_t) { return provider->provide(bytes); },
        [provider](void* segment, size_t, int, cudaStream_t) { provider->take_back(segment); });
#if GLAKE_TORCH >= 211
    native_->createOrIncrefPool(device, pool, std::move(segments));
#else
    native_->createOrIncrefPool(device, pool, segments.get());
#endif
    const std::lock_guard<std::mutex> lock(mutex_);
#if GLAKE_TORCH < 211
    segments_.push_back(std::move(segments)); // This torch follows a pointer to it.
#endif
    pools_[Key{device, pool}] = std::move(provider);
    any_.store(true, std::memory_order_release);
  }

  void begin(DeviceIndex device, const MempoolId_t& pool, Filter filter) {
    native_->beginAllocateToPool(device, pool, std::move(filter));
    ++open_;
  }

  void end(DeviceIndex device, const MempoolId_t& pool) {
    --open_;
    native_->endAllocateToPool(device, pool);
  }

  /// A graph may be captured in a pool of ours until `capture_ended` is given the answer: torch's native allocator, which does not know
  /// of it, would otherwise ask events about blocks of such pools, and that breaks a capture.
  uint64_t capture_may_begin(DeviceIndex device) {
    auto* native = this->native();
    if (native == nullptr) {
      return 0;
    }
    const uint64_t mark = ++marks_;
    native->beginAllocateToPool(device, marked(mark), [](cudaStream_t) { return false; });
    return mark;
  }

  void capture_ended(DeviceIndex device, uint64_t mark) {
    if (mark != 0) {
      native_->endAllocateToPool(device, marked(mark));
      native_->releasePool(device, marked(mark));
    }
  }

  /// The pool has no owner any more and what it could give back went: its number names nothing.
  void forget(DeviceIndex device, const MempoolId_t& pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pools_.erase(Key{device, pool});
  }

  /// A block of the pool, which takes the stream. Throws what torch's native allocator does.
  void* allocate(DeviceIndex device, const MempoolId_t& pool, size_t bytes, cudaStream_t stream) {
    const auto provider = provider_of(device, pool);
    void* block = native_->raw_alloc_with_stream(bytes, stream);
    // What its owner has unmapped stays taken, so that nobody else gets it.
    while (block != nullptr && provider != nullptr && provider->is_gone(native_->getBaseAllocation(block, nullptr))) {
      block = native_->raw_alloc_with_stream(bytes, stream);
    }
    return block;
  }

  /// Takes a block back that is no block of libgmlake's; false where it is none of these pools' either.
  bool release(void* block) const noexcept {
    try {
      if (auto* native = this->native()) {
        native->raw_delete(block);
        return true;
      }
    } catch (const std::exception&) {
      // The caller says what it is.
    }
    return false;
  }

  /// Whether `data` is a block of such a pool.
  bool owns(const c10::DataPtr& data) const {
    auto* native = this->native();
    return native != nullptr && data.get() != nullptr && data.get_deleter() == native->raw_deleter();
  }

 private:
  using Key = std::pair<DeviceIndex, MempoolId_t>;

  /// The name of an empty pool of the native allocator. torch's own names have one word that is zero, so that this is nobody else's.
  static MempoolId_t marked(uint64_t mark) {
    return MempoolId_t{mark, mark};
  }

  std::shared_ptr<Provider> provider_of(DeviceIndex device, const MempoolId_t& pool) const {
    if (!any_.load(std::memory_order_acquire)) {
      return nullptr;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = pools_.find(Key{device, pool});
    return known == pools_.end() ? nullptr : known->second;
  }

  caching::CUDAAllocator* native_ = nullptr;
  std::atomic<bool> any_{false};
  std::atomic<int> open_{0};
  std::atomic<uint64_t> marks_{0};
  mutable std::mutex mutex_;
  std::map<Key, std::shared_ptr<Provider>> pools_;
#if GLAKE_TORCH < 211
  std::vector<std::shared_ptr<caching::CUDAAllocator>> segments_;
#endif
};

} // namespace glake
