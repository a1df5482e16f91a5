//! Memory for the copies of a shrink, had while the first of them are made.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope};

use crossbeam_channel::{Receiver, Sender, bounded};
use glake_device::DeviceId;
use glake_units::Bytes;

use super::Store;
use super::peer::PeerBlock;
use crate::GpuPool;

/// How many blocks of a peer wait for their copies.
const BLOCKS: usize = 4;

/// Blocks of a peer's pool in the order in which copies need them, as long as there are any; none where the store is another.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Option<Receiver<Arc<PeerBlock>>>);

impl Ahead {
    /// The next block; waits for it.
    pub(super) fn next(&self) -> Option<Arc<PeerBlock>> {
        self.0.as_ref()?.recv().ok()
    }
}

impl Store {
    /// Has memory for copies of these sizes had by a thread of its own, until it is `over`: host memory is pinned, a peer's is mapped.
    /// Where it cannot, who needs memory takes it.
    pub(crate) fn had_ahead<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        guest: DeviceId,
        sizes: &[Bytes],
        over: &'s AtomicBool,
    ) -> Ahead {
        let begin = |name: &str, work: Box<dyn FnOnce() + Send + 's>| {
            if let Err(error) = Builder::new().name(name.to_owned()).spawn_scoped(scope, work) {
                tracing::debug!(target: "glake::region", %error, "no thread has memory ahead");
            }
        };
        match self {
            Store::Host(host) => {
                if let Some(expected) = host.expect(sizes) {
                    begin("glake-pin", Box::new(move || expected.pin(|| !over.load(Ordering::Relaxed))));
                }
                Ahead::default()
            }
            Store::Peer(peer) if peer.device() != guest && sizes.len() > 1 => {
                let (sizes, (put, take)) = (sizes.to_vec(), bounded(BLOCKS));
                begin("glake-lodge", Box::new(move || lodge(peer, guest, &sizes, &put)));
                Ahead(Some(take))
            }
            Store::Peer(_) | Store::File { .. } => Ahead::default(),
        }
    }
}

/// Until there is no memory, or nobody takes any more.
fn lodge(peer: &Arc<GpuPool>, guest: DeviceId, sizes: &[Bytes], put: &Sender<Arc<PeerBlock>>) {
    for &size in sizes {
        let Ok(block) = PeerBlock::take(peer, guest, size) else { return };
        if put.send(block).is_err() {
            return;
        }
    }
}
