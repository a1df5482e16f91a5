// What is used of torch, and nothing more: the headers of c10, which compile in a second, and the version that they are of.
#pragma once

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>

#define GLAKE_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

namespace glake {

namespace caching = c10::cuda::CUDACachingAllocator;

using c10::DeviceIndex;
using c10::GatheredContext;
using c10::cuda::CUDAStream;
using c10::cuda::MempoolId_t;
using caching::RecordContext;
using caching::TraceEntry;
using Annotation = decltype(caching::SnapshotInfo::external_annotations)::value_type;
using Context = std::shared_ptr<GatheredContext>;

/// torch's name for memory outside of every private pool.
inline const MempoolId_t kNoPool{0, 0};

/// A block of the pool is its request rounded up to this.
inline size_t rounded(size_t bytes) {
  constexpr size_t kPacking = 512;
  return (bytes + kPacking - 1) / kPacking * kPacking;
}

inline c10::Device cuda(DeviceIndex device) {
  return c10::Device(c10::DeviceType::CUDA, device);
}

} // namespace glake
