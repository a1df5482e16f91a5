// Copies a list of blocks, a warp to a block: many small copies in one launch.
//
// glake_gather(list, count): block i of the list moves list[i].bytes bytes from list[i].from to list[i].to. Either end may be memory
// of this GPU, memory of another that this one may access, or pinned host memory; the list may lie in any of them. Any address and any
// size are right; blocks of one list must not overlap. Only aligned words that hold a byte of the source are read, and only bytes of
// the target written. Warps take blocks in turn, so any grid is right.
//
// glake_copy(to, from, bytes): one block, cut into pieces that the warps take in turn: the relay of a copy between pinned host memory and
// another GPU's memory.
//
// Made into gather.ptx with NVRTC 12.0: --gpu-architecture=compute_70 --std=c++17.

typedef unsigned long long u64;
typedef unsigned int u32;

struct Block {
  u64 to;
  u64 from;
  u64 bytes;
};

#define LANES 32
// Loads a lane has in flight: 16 bytes each, 2 KiB a warp.
#define FLIGHT 4
// What a warp takes at a time of one large block.
#define PIECE 4096

__device__ __forceinline__ void copy_bytes(u64 to, u64 from, u64 bytes, u64 lane) {
  for (u64 at = lane; at < bytes; at += LANES) *(unsigned char *)(to + at) = *(const unsigned char *)(from + at);
}

template <typename Word>
__device__ __forceinline__ void copy_words(u64 to, u64 from, u64 words, u64 lane) {
  Word *target = (Word *)to;
  const Word *source = (const Word *)from;
  for (u64 at = lane; at < words; at += LANES * FLIGHT) {
    Word held[FLIGHT];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < words) held[i] = source[at + i * LANES];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < words) target[at + i * LANES] = held[i];
  }
}

// The target is a multiple of four, the source is not: each word is put together of two.
__device__ __forceinline__ void copy_shifted(u64 to, u64 from, u64 words, u64 lane) {
  u32 *target = (u32 *)to;
  const u32 *source = (const u32 *)(from & ~3ull);
  u32 shift = (u32)(from & 3) * 8;
  for (u64 at = lane; at < words; at += LANES * FLIGHT) {
    u32 low[FLIGHT], high[FLIGHT];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < words) {
        low[i] = source[at + i * LANES];
        high[i] = source[at + i * LANES + 1];
      }
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < words) target[at + i * LANES] = __funnelshift_r(low[i], high[i], shift);
  }
}

__device__ __forceinline__ void copy_block(const Block &block, u64 lane) {
  u64 skew = (block.to ^ block.from) & 15;
  u64 word = skew == 0 ? 16 : 4;
  u64 head = (0 - block.to) & (word - 1);
  if (head > block.bytes) head = block.bytes;
  u64 words = (block.bytes - head) / word;
  u64 body = words * word;
  u64 to = block.to + head, from = block.from + head;
  copy_bytes(block.to, block.from, head, lane);
  if (skew == 0)
    copy_words<uint4>(to, from, words, lane);
  else if ((skew & 3) == 0)
    copy_words<u32>(to, from, words, lane);
  else
    copy_shifted(to, from, words, lane);
  copy_bytes(to + body, from + body, block.bytes - head - body, lane);
}

extern "C" __global__ void __launch_bounds__(1024) glake_gather(const Block *list, u64 count) {
  u64 lane = threadIdx.x & (LANES - 1);
  u64 warps = (u64)gridDim.x * (blockDim.x / LANES);
  // Neighbours in the list go to different multiprocessors.
  u64 at = (u64)(threadIdx.x / LANES) * gridDim.x + blockIdx.x;
  if (at >= count) return;
  Block block = list[at];
  for (; at < count; at += warps) {
    Block next = block;
    if (at + warps < count) next = list[at + warps];
    copy_block(block, lane);
    block = next;
  }
}

extern "C" __global__ void __launch_bounds__(1024) glake_copy(u64 to, u64 from, u64 bytes) {
  u64 lane = threadIdx.x & (LANES - 1);
  u64 step = (u64)gridDim.x * (blockDim.x / LANES) * PIECE;
  u64 at = ((u64)(threadIdx.x / LANES) * gridDim.x + blockIdx.x) * PIECE;
  for (; at < bytes; at += step) {
    u64 left = bytes - at;
    Block piece = {to + at, from + at, left < PIECE ? left : PIECE};
    copy_block(piece, lane);
  }
}
