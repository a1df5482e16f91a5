// Digests a list of pieces of memory, a warp to a piece: what they hold, and where each word of it stands.
//
// glake_digest(list, count, sums, blocks): each word of 8 bytes of piece i is mixed with its position, which is list[i].position for the
// first, and all that the thread blocks find is added up: sums[b] is what block b found, and the sum of all of them is the same
// whatever the launch is like. Pieces begin at multiples of 16; only the last one of what is digested may have a size that is none, and
// its last word is filled with zeros. Warps take pieces in turn, so any grid is right; `blocks` is how many thread blocks there are.
//
// Made into digest.ptx with NVRTC 12.0: --gpu-architecture=compute_70 --std=c++17.

typedef unsigned long long u64;

struct Piece {
  u64 start;
  u64 bytes;
  u64 position;
};

#define LANES 32
// Loads a lane has in flight: 16 bytes each, 2 KiB a warp.
#define FLIGHT 4

// Different words at one position give different values, for each step can be undone. The key differs between positions, and the
// product is no sum of what the word and the key give alone, so words that change places are found too.
__device__ __forceinline__ u64 mix(u64 word, u64 position) {
  u64 held = word ^ (position + 1) * 0x9E3779B97F4A7C15ull;
  held *= 0xBF58476D1CE4E5B9ull;
  held ^= held >> 32;
  held *= 0x94D049BB133111EBull;
  return held ^ held >> 32;
}

__device__ __forceinline__ u64 digest_piece(const Piece &piece, u64 lane) {
  const ulonglong2 *pairs = (const ulonglong2 *)piece.start;
  u64 count = piece.bytes / 16, sum = 0;
  for (u64 at = lane; at < count; at += LANES * FLIGHT) {
    ulonglong2 held[FLIGHT];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < count) held[i] = pairs[at + i * LANES];
#pragma unroll
    for (int i = 0; i < FLIGHT; i++)
      if (at + i * LANES < count) {
        u64 position = piece.position + 2 * (at + i * LANES);
        sum += mix(held[i].x, position) + mix(held[i].y, position + 1);
      }
  }
  // The last bytes are at most two words, for two lanes.
  u64 from = count * 16 + lane * 8;
  if (lane < 2 && from < piece.bytes) {
    u64 word = 0;
    for (u64 byte = 0; byte < 8 && from + byte < piece.bytes; byte++)
      word |= (u64) * (const unsigned char *)(piece.start + from + byte) << 8 * byte;
    sum += mix(word, piece.position + 2 * count + lane);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(1024) glake_digest(const Piece *list, u64 count, u64 *sums, u64 blocks) {
  __shared__ u64 found[LANES];
  u64 lane = threadIdx.x & (LANES - 1), warp = threadIdx.x / LANES;
  u64 warps = blockDim.x / LANES;
  u64 sum = 0;
  // Neighbours in the list go to different multiprocessors.
  for (u64 at = warp * blocks + blockIdx.x; at < count; at += warps * blocks) {
    Piece piece = list[at];
    sum += digest_piece(piece, lane);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) found[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u64 other = 1; other < warps; other++) sum += found[other];
    sums[blockIdx.x] = sum;
  }
}
