//! Free pieces that lie apart become one block: the pool for Rust programs, on a simulated GPU of real memory.
//!
//! ```text
//! cargo run --package glake-tiers --example pool
//! ```
//!
//! On a GPU the driver is `glake_device::cuda`'s; nothing else changes.

use std::sync::Arc;

use glake_device::{DeviceId, Driver, Stream};
use glake_sim::{SimOptions, Simulator};
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default())?);
    let pool = GpuPool::new(driver.clone(), DeviceId(0), PoolOptions::default())?;
    let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY)?;

    // Eight blocks side by side, of which every other one is freed: 128 MiB are free, and no run of them is above 32.
    let blocks = (0..8).map(|_| pool.malloc(Bytes::mib(32), stream)).collect::<Result<Vec<_>, _>>()?;
    for block in blocks.iter().step_by(2) {
        pool.free(block.address)?;
    }
    let before = pool.reserved();
    println!("{before} reserved, {} free ranges", pool.report().free_ranges());

    // One block of all that is free: its memory is mapped a second time, side by side.
    let stitched = pool.malloc(Bytes::mib(128), stream)?;
    println!("{} for 128 MiB more, {} stitched", pool.reserved(), pool.stats().counters.stitches);
    if pool.reserved() != before {
        return Err("the pool grew".into());
    }

    // It is as any other block: contiguous, with bytes of its own.
    pool.write(stitched.address, b"real bytes")?;
    let mut back = [0; 10];
    pool.read(stitched.address, &mut back)?;
    println!("{}", String::from_utf8_lossy(&back));

    pool.free(stitched.address)?;
    for block in blocks.iter().skip(1).step_by(2) {
        pool.free(block.address)?;
    }
    println!("{} given back", pool.trim(Bytes::ZERO)?);
    Ok(())
}
