// Which blocks of a private pool were live: what compile's graph trees go back to before they record another branch.
#pragma once

#include <utility>
#include <vector>

#include "history.h"
#include "status.h"
#include "torch.h"

namespace glake {

class Checkpoint : public caching::AllocatorState {
 public:
  Checkpoint(DeviceIndex device, MempoolId_t pool) : device_(device), pool_(std::move(pool)) {
    check(glake_pool_checkpoint(device_, pool_.first, pool_.second, &state_));
  }
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;
  ~Checkpoint() override {
    glake_checkpoint_drop(state_);
  }

  /// Goes back to it. `deleter` is what frees a block that lives again.
  caching::CheckpointDelta restore(History& history, c10::DeleterFnPtr deleter) const {
    const Context context = history.gather(RecordContext::STATE);
    Changes changes;
    const int32_t status = glake_pool_restore(state_, &freed, &allocated, &changes);
    if (status != GLAKE_OK) {
      raise(status, last_error());
    }
    caching::CheckpointDelta delta;
    for (void* block : changes.freed) {
      if (history.watched()) {
        history.ends(device_, block, nullptr);
      }
      delta.ptrs_freed.push_back(block);
    }
    for (const auto& [block, size] : changes.allocated) {
      if (history.watched()) {
        history.began(device_, block, Live{context, nullptr, pool_, size});
      }
      delta.dataptrs_allocd.emplace_back(block, block, deleter, cuda(device_));
    }
    return delta;
  }

 private:
  struct Changes {
    std::vector<void*> freed;
    std::vector<std::pair<void*, uint64_t>> allocated;
  };

  static void freed(void* context, void* block) noexcept {
    static_cast<Changes*>(context)->freed.push_back(block);
  }

  static void allocated(void* context, void* block, uint64_t size) noexcept {
    static_cast<Changes*>(context)->allocated.emplace_back(block, size);
  }

  DeviceIndex device_;
  MempoolId_t pool_;
  glake_checkpoint* state_ = nullptr;
};

} // namespace glake
