//! Live bytes of blocks, declared once or by a callback at each shrink.
//!
//! ```text
//! shrink   gate closed, uses ended or parked ─► all work has ended ─► each callback, on its own thread ─► the first extent leaves
//! ```
//!
//! A callback runs without locks. If it fails, times out, or names bytes outside its block, all bytes of the block count as live and the
//! report says so.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId};
use glake_stitch::DomainId;
use glake_tiers::{ByteRange, GpuPool, LiveAnswer};
use parking_lot::Mutex;

use super::super::{ProcessError, Result};
use super::RegionSet;
use super::closing::POLL;

/// Callback that returns the live bytes of a block; `None` if it cannot.
pub type LiveCallback = Arc<dyn Fn() -> Option<Vec<ByteRange>> + Send + Sync>;

/// Callbacks of a process.
#[derive(Default)]
pub(super) struct LiveCallbacks {
    all: Mutex<Vec<Asked>>,
}

/// A block with a callback.
#[derive(Clone)]
struct Asked {
    pool: Arc<GpuPool>,
    address: Address,
    answer: LiveAnswer,
    call: LiveCallback,
}

impl LiveCallbacks {
    fn add(&self, asked: Asked) {
        self.all.lock().push(asked);
        self.forget();
    }

    /// Drops callbacks of freed blocks and of blocks with a newer declaration. Their destructors are the program's code.
    fn forget(&self) {
        let gone: Vec<Asked> = self.all.lock().extract_if(.., |asked| asked.domain().is_none()).collect();
        drop(gone);
    }

    /// Returns the callbacks of blocks in these domains.
    fn of(&self, domains: &[(DeviceId, DomainId)]) -> Vec<Asked> {
        self.forget();
        let all = self.all.lock().clone();
        let lies_in = |asked: &Asked| {
            asked.domain().is_some_and(|domain| domains.contains(&(asked.pool.device(), domain)))
        };
        all.into_iter().filter(lies_in).collect()
    }
}

impl Asked {
    fn domain(&self) -> Option<DomainId> {
        self.pool.live_bytes().asked(self.answer)
    }
}

impl std::fmt::Debug for LiveCallbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LiveCallbacks").field("count", &self.all.lock().len()).finish()
    }
}

impl RegionSet {
    /// Implements [`super::Regions::set_live`].
    pub(super) fn set_live(&self, address: Address, ranges: Option<&[ByteRange]>) -> Result<()> {
        let pool = self.pool_of(address)?;
        match ranges {
            Some(ranges) => pool.live_bytes().set(address, ranges)?,
            None => pool.live_bytes().clear(address)?,
        }
        self.live_callbacks.forget();
        Ok(())
    }

    /// Implements [`super::Regions::ask_live`].
    pub(super) fn ask_live(&self, address: Address, call: LiveCallback) -> Result<()> {
        let pool = self.pool_of(address)?;
        let answer = pool.live_bytes().ask(address)?;
        self.live_callbacks.add(Asked { pool, address, answer, call });
        Ok(())
    }

    fn pool_of(&self, address: Address) -> Result<Arc<GpuPool>> {
        let found = self.started_at(address).map(|started| started.pool.clone());
        found.ok_or(ProcessError::InNoBlock { address })
    }

    /// Calls the callbacks of blocks in these domains, whose work has ended; returns warnings for the report.
    pub(super) fn learn_live(&self, domains: &[(DeviceId, DomainId)]) -> Result<Vec<String>> {
        let asked = self.live_callbacks.of(domains);
        let Some(first) = asked.first() else { return Ok(Vec::new()) };
        let mut pending = first.pool.pending_work()?;
        while !pending.has_ended()? {
            std::thread::sleep(POLL);
        }
        let timeout = self.hooks.timeout().unwrap_or(Duration::from_millis(self.config.drain_timeout_ms));
        let answers = answers(asked.iter().map(|asked| asked.call.clone()).collect(), timeout)?;
        let mut warnings = Vec::new();
        for (asked, answer) in asked.iter().zip(answers) {
            let said = asked.pool.live_bytes().answer(asked.answer, answer.as_deref().ok());
            let why = match (&answer, said) {
                (Ok(_), Ok(())) => continue,
                (Err(why), _) => why.clone(),
                (Ok(_), Err(error)) => error.to_string(),
            };
            let (device, address) = (asked.pool.device(), asked.address);
            let warning = format!(
                "{device}: all bytes of the block at {address} are copied, for what counts of it is not known: {why}"
            );
            tracing::warn!(target: "glake::regions", "{warning}");
            warnings.push(warning);
        }
        Ok(warnings)
    }
}

/// Returns the answer of each callback, all within the timeout.
fn answers(
    calls: Vec<LiveCallback>,
    timeout: Duration,
) -> Result<Vec<std::result::Result<Vec<ByteRange>, String>>> {
    let (count, end) = (calls.len(), Instant::now() + timeout);
    let (sender, receiver) = sync_channel(count);
    let run = move || {
        for call in calls {
            let answer = call();
            // Dropped here, because its destructor is the program's code too.
            drop(call);
            // Fails only after a timeout.
            if sender.send(answer).is_err() {
                return;
            }
        }
    };
    let named = std::thread::Builder::new().name("glake-live".to_owned());
    named
        .spawn(run)
        .map_err(|source| ProcessError::NoThread { what: "callbacks that say which bytes count", source })?;
    let (mut late, mut gone) = (None, "its callback panicked");
    let next = |_| {
        if let Some(why) = &late {
            return Err(String::clone(why));
        }
        match receiver.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(answer) => answer.ok_or_else(|| "its callback failed".to_owned()),
            // The thread panicked; the remaining callbacks are not to blame.
            Err(RecvTimeoutError::Disconnected) => {
                let why = std::mem::replace(&mut gone, "one before it panicked");
                Err(why.to_owned())
            }
            Err(RecvTimeoutError::Timeout) => {
                let why = format!("its callback did not answer within {} s", timeout.as_secs_f64());
                late = Some(why.clone());
                Err(why)
            }
        }
    };
    Ok((0..count).map(next).collect())
}
