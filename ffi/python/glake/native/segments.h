// The pool's memory as torch's snapshot shows it.
//
// A run of mapped memory at home is a segment that grows and shrinks in place: torch's "expandable". So is a stitched view, whose
// total is what it shows, though it owns no memory of its own.
#pragma once

#include <vector>

#include "history.h"
#include "status.h"
#include "torch.h"

namespace glake {

class Segments {
 public:
  /// Adds the segments of a device to `info`; only those of `pool` unless it is no pool. Returns the bytes in use.
  static size_t write(caching::SnapshotInfo& info, DeviceIndex device, MempoolId_t pool, const History& history) {
    Segments writer(info.segments, pool, history);
    check(glake_segments(device, &segment, &block, &writer));
    size_t active = 0;
    for (size_t at = writer.first_; at < info.segments.size(); ++at) {
      active += info.segments[at].active_size;
#if GLAKE_TORCH >= 211
      // In the order of addresses: the same on every rank of a program that allocates alike.
      info.segments[at].registration_counter = static_cast<int32_t>(at - writer.first_);
#endif
    }
    return active;
  }

  /// Tells the history which blocks live now.
  static void seed(History& history, DeviceIndex device) {
    Seeds seeds{history, nullptr, kNoPool};
    check(glake_segments(device, &seed_segment, &seed_block, &seeds));
  }

 private:
  struct Seeds {
    History& history;
    void* stream;
    MempoolId_t pool;
  };

  Segments(std::vector<caching::SegmentInfo>& segments, MempoolId_t pool, const History& history)
      : segments_(segments), first_(segments.size()), pool_(std::move(pool)), history_(history) {}

  static void segment(void* context, const glake_segment* from) noexcept {
    auto& self = *static_cast<Segments*>(context);
    const MempoolId_t pool{from->pool_first, from->pool_second};
    self.wanted_ = self.pool_ == kNoPool || self.pool_ == pool;
    if (!self.wanted_) {
      return;
    }
    auto& to = self.segments_.emplace_back();
    to.device = static_cast<DeviceIndex>(from->device);
    to.address = from->address;
    to.total_size = from->size;
    to.stream = static_cast<cudaStream_t>(from->stream);
    to.is_large = from->large;
    to.is_expandable = true;
    to.owner_private_pool_id = pool;
  }

  static void block(void* context, const glake_segment_block* from) noexcept {
    auto& self = *static_cast<Segments*>(context);
    if (!self.wanted_) {
      return;
    }
    auto& segment = self.segments_.back();
    auto& to = segment.blocks.emplace_back();
    to.size = from->size;
    to.requested_size = from->requested;
    to.allocated = from->live;
    to.active = from->live || from->pending;
    if (to.allocated) {
      segment.allocated_size += to.size;
      to.context_when_allocated = self.history_.context_of(reinterpret_cast<void*>(from->address));
    }
    if (to.active) {
      segment.active_size += to.size;
      segment.requested_size += to.requested_size;
    }
  }

  static void seed_segment(void* context, const glake_segment* from) noexcept {
    auto& seeds = *static_cast<Seeds*>(context);
    seeds.stream = from->stream;
    seeds.pool = MempoolId_t{from->pool_first, from->pool_second};
  }

  static void seed_block(void* context, const glake_segment_block* from) noexcept {
    auto& seeds = *static_cast<Seeds*>(context);
    if (from->live) {
      seeds.history.found(reinterpret_cast<void*>(from->address), Live{nullptr, seeds.stream, seeds.pool, from->requested});
    }
  }

  std::vector<caching::SegmentInfo>& segments_;
  size_t first_;
  MempoolId_t pool_;
  const History& history_;
  bool wanted_ = false;
};

} // namespace glake
