//! Somebody who works on while a region leaves and comes back: allocates, writes, compares and frees, all the time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};

use glake_device::Address;
use glake_sim::pattern::{fill, matching};
use glake_tiers::{Block, GpuPool, PoolStream};
use glake_units::Bytes;

use super::DemoError;
use fastrand::Rng;

/// Number of blocks that the neighbour holds, and their maximum size.
const HELD: usize = 8;
const LARGEST: usize = 2 << 20;

/// Progress of a neighbour, readable by others.
#[derive(Debug, Default)]
pub(super) struct Neighbour {
    done: AtomicBool,
    blocks: AtomicU64,
}

/// Ends the neighbour when it is dropped, also where the story breaks off.
pub(super) struct Working<'scope> {
    neighbour: &'scope Neighbour,
    thread: Option<ScopedJoinHandle<'scope, Result<Bytes, DemoError>>>,
}

impl Neighbour {
    /// Begins to work on the default domain of a pool.
    pub(super) fn begin<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        pool: &'scope GpuPool,
        stream: PoolStream,
    ) -> Working<'scope> {
        let thread = scope.spawn(move || self.work(pool, stream));
        Working { neighbour: self, thread: Some(thread) }
    }

    /// Returns the number of blocks compared and freed.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// Works until it is told to end; the bytes that it has compared.
    fn work(&self, pool: &GpuPool, stream: PoolStream) -> Result<Bytes, DemoError> {
        let (mut random, mut live, mut compared) = (Rng::with_seed(11), Vec::new(), Bytes::ZERO);
        let mut bytes = vec![0; LARGEST];
        let mut seed = 0;
        while !self.done.load(Ordering::Acquire) {
            seed += 1;
            let size = 8 * (1 + random.usize(..LARGEST / 8));
            fill(&mut bytes[..size], 0, seed);
            let block = pool.malloc(Bytes::new(size as u64), stream)?;
            pool.write(block.address, &bytes[..size])?;
            live.push((block, size, seed));
            if live.len() == HELD {
                let gone = live.swap_remove(random.usize(..HELD));
                compared = compared.saturating_add(self.give(pool, gone, &mut bytes)?);
            }
        }
        for block in live {
            compared = compared.saturating_add(self.give(pool, block, &mut bytes)?);
        }
        Ok(compared)
    }

    /// Compares a block and frees it.
    fn give(
        &self,
        pool: &GpuPool,
        (block, size, seed): (Block, usize, u64),
        bytes: &mut [u8],
    ) -> Result<Bytes, DemoError> {
        pool.read(block.address, &mut bytes[..size])?;
        let matched = matching(&bytes[..size], 0, seed);
        if matched < size as u64 {
            return Err(differs("the neighbour's block", block.address, matched));
        }
        pool.free(block.address)?;
        self.blocks.fetch_add(1, Ordering::Release);
        Ok(Bytes::new(matched))
    }
}

impl Working<'_> {
    /// Ends the work; the bytes that it has compared.
    pub(super) fn end(mut self) -> Result<Bytes, DemoError> {
        self.neighbour.done.store(true, Ordering::Release);
        match self.thread.take().map(ScopedJoinHandle::join) {
            Some(Ok(compared)) => compared,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(Bytes::ZERO),
        }
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.neighbour.done.store(true, Ordering::Release);
    }
}

/// Creates the error for a block with wrong contents.
pub(super) fn differs(what: &str, address: Address, at: u64) -> DemoError {
    DemoError::Bytes(format!("{what} at {address}, byte {at}: not what was written there was found"))
}
