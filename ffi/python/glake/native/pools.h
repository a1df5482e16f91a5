// torch's private pools: of graphs, and torch.cuda.MemPool, with or without an allocator of its own.
//
// Invariant: libgmlake knows every pool and counts its owners, also of those whose memory is not its own; torch's native allocator
// counts the owners of these too.
#pragma once

#include <memory>
#include <unordered_set>
#include <utility>

#include "checkpoint.h"
#include "foreign.h"
#include "history.h"
#include "routes.h"
#include "status.h"
#include "torch.h"

namespace glake {

class PrivatePools {
 public:
  /// Where allocations go.
  Routes& routes() {
    return routes_;
  }

  ForeignPools& foreign() {
    return foreign_;
  }

  /// `native` hands out the blocks of pools with an allocator of their own.
  void take_from(caching::CUDAAllocator* native) {
    foreign_.use(native);
  }

  void init(int devices) {
    foreign_.init(devices);
  }

  /// Makes a pool, or adds an owner to it. `inner` is the allocator that it brings, if any.
  void create(DeviceIndex device, const MempoolId_t& pool, ForeignPools::Inner inner) {
    if (inner != nullptr) {
      foreign_.create(device, pool, std::move(inner));
    } else if (foreign_.has(device, pool)) {
      foreign_.native()->createOrIncrefPool(device, pool);
    }
    check(glake_pool_create(device, pool.first, pool.second));
  }

  void release(DeviceIndex device, const MempoolId_t& pool) {
    if (foreign_.has(device, pool)) {
      foreign_.native()->releasePool(device, pool);
    }
    check(glake_pool_release(device, pool.first, pool.second));
    if (owners(device, pool) == 0) {
      routes_.help(device, pool, false);
    }
  }

  static int owners(DeviceIndex device, const MempoolId_t& pool) {
    int32_t count = 0;
    const int32_t status = glake_pool_use_count(device, pool.first, pool.second, &count);
    if (status == GLAKE_INVALID) {
      return 0;
    }
    check(status);
    return count;
  }

  /// Gives back what is free in a pool. No exception: torch calls this in the destructor of its MemPool.
  void empty(DeviceIndex device, const MempoolId_t& pool) {
    const int32_t status = glake_pool_trim(device, pool.first, pool.second);
    // A pool lives on the devices that used it, and may have ended with its last owner.
    if (status != GLAKE_OK && status != GLAKE_INVALID) {
      warn(last_error());
    }
    if (foreign_.has(device, pool)) {
      foreign_.native()->emptyCache(pool);
      if (owners(device, pool) == 0) {
        foreign_.forget(device, pool);
      }
    }
  }

#if GLAKE_TORCH >= 210
  /// Without effect in a pool of ours: there are no segments to be kept whole, memory is mapped to fit.
  void no_split(DeviceIndex device, const MempoolId_t& pool) {
    if (foreign_.has(device, pool)) {
      foreign_.native()->setNoSplit(device, pool);
    }
  }
#endif

  /// Whether exactly these blocks of a pool live.
  bool lives(DeviceIndex device, const MempoolId_t& pool, const std::unordered_set<void*>& expected) {
    if (foreign_.has(device, pool)) {
      return foreign_.native()->checkPoolLiveAllocations(device, pool, expected);
    }
    std::unordered_set<void*> live;
    const auto visit = [](void* context, void* block, uint64_t) noexcept {
      static_cast<std::unordered_set<void*>*>(context)->insert(block);
    };
    check(glake_pool_blocks(device, pool.first, pool.second, visit, &live));
    return live == expected;
  }

  std::shared_ptr<caching::AllocatorState> checkpoint(DeviceIndex device, const MempoolId_t& pool) {
    if (foreign_.has(device, pool)) {
      return foreign_.native()->getCheckpointState(device, pool);
    }
    return std::make_shared<Checkpoint>(device, pool);
  }

  /// Goes back to a checkpoint. `deleter` is what frees a block that lives again.
  caching::CheckpointDelta restore(
      DeviceIndex device,
      std::shared_ptr<caching::AllocatorState> state,
      History& history,
      c10::DeleterFnPtr deleter) {
    const auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    if (auto* native = foreign_.native(); native != nullptr && checkpoint == nullptr) {
      return native->setCheckpointPoolState(device, std::move(state));
    }
    TORCH_CHECK(checkpoint != nullptr, "glake: the checkpoint is of another allocator");
    return checkpoint->restore(history, deleter);
  }

 private:
  ForeignPools foreign_;
  Routes routes_{foreign_};
};

} // namespace glake
