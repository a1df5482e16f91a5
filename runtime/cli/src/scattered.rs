//! Blocks that lie in order on the host and in any order on a GPU.

use fastrand::Rng;
use glake_units::Bytes;

/// Returns offset on the host, offset on the GPU and size of each block. The last one may be shorter.
pub(crate) fn scattered(size: Bytes, block: Bytes) -> Vec<(Bytes, Bytes, Bytes)> {
    let (size, block) = (size.get(), block.get().max(1));
    let whole = size / block;
    let mut places: Vec<u64> = (0..whole).collect();
    Rng::with_seed(1).shuffle(&mut places);
    let mut blocks: Vec<_> =
        (0..).zip(places).map(|(here, there): (u64, u64)| (here * block, there * block, block)).collect();
    if !size.is_multiple_of(block) {
        blocks.push((whole * block, whole * block, size % block));
    }
    blocks
        .into_iter()
        .map(|(here, there, size)| (Bytes::new(here), Bytes::new(there), Bytes::new(size)))
        .collect()
}
