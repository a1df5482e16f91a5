//! Callbacks of the program: hooks before and after its memory leaves or returns, and callbacks for the live bytes of blocks.
//!
//! A hook runs on its own thread, without locks, up to a timeout. After the timeout it keeps running, but its result is ignored. If memory
//! returns because it is touched, hooks are called but not waited for: the touching thread may hold a lock that they need, such as an
//! interpreter's or an allocator's.
//!
//! Live bytes are declared once, or by a callback at each shrink:
//!
//! ```text
//! shrink   gate closed, uses ended or parked ─► all work has ended ─► each callback, on its own thread ─► the first extent leaves
//! ```
//!
//! Such a callback runs without locks too. If it fails, times out, or names bytes outside its block, all bytes of the block count as live
//! and the report says so.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId};
use glake_stitch::DomainId;
use glake_tiers::{ByteRange, GpuPool, LiveAnswer};
use parking_lot::{Mutex, RwLock};
use serde_json::Value;

use super::super::{ProcessError, Result};
use super::RegionSet;
use super::shrink::POLL;

/// Hook that gets an event as JSON and returns 0 on success.
pub type Hook = Arc<dyn Fn(&str) -> i32 + Send + Sync>;

/// Hooks of a process.
#[derive(Default)]
pub(super) struct Hooks {
    both: RwLock<Both>,
}

#[derive(Clone, Default)]
struct Both {
    before: Option<Hook>,
    after: Option<Hook>,
    /// Timeout of a hook; `None` waits forever.
    timeout: Option<Duration>,
}

/// Sender of the end event of an operation that waits for no hook.
#[derive(Debug)]
pub(super) struct Beside(Option<SyncSender<Value>>);

impl Beside {
    /// Calls the hook after the operation, once the one before has returned.
    pub(super) fn over(self, event: Value) {
        if let Some(sender) = self.0 {
            // Fails only if no thread could be started.
            let _ = sender.try_send(event);
        }
    }
}

impl Hooks {
    /// Replaces both hooks and their timeout.
    pub(super) fn set(&self, before: Option<Hook>, after: Option<Hook>, timeout: Option<Duration>) {
        let others = std::mem::replace(&mut *self.both.write(), Both { before, after, timeout });
        // Their destructors are the program's code.
        drop(others);
    }

    /// Returns the timeout of hooks and of live-bytes callbacks, even without a hook; `None` if it was never set.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.both.read().timeout
    }

    /// Calls the hook before an operation.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if a hook refuses or times out: the operation must be cancelled.
    pub(super) fn before(&self, event: &Value) -> Result<()> {
        let Both { before, timeout, .. } = self.both.read().clone();
        before.map_or(Ok(()), |hook| call(hook, "before", event, timeout))
    }

    /// Calls both hooks in order, for an operation that begins now and waits for neither. Their results are logged.
    pub(super) fn beside(&self, event: &Value) -> Beside {
        let Both { before, after, .. } = self.both.read().clone();
        if before.is_none() && after.is_none() {
            return Beside(None);
        }
        let (sender, receiver) = sync_channel(1);
        let event = event.clone();
        let run = move || {
            tell(before, "before", event);
            // No event arrives if the operation did not end normally.
            if let Ok(event) = receiver.recv() {
                tell(after, "after", event);
            }
        };
        let named = std::thread::Builder::new().name("glake-hook".to_owned());
        if let Err(error) = named.spawn(run) {
            tracing::warn!(target: "glake::regions", %error, "no thread to call hooks on");
        }
        Beside(Some(sender))
    }

    /// Calls the hook after an operation. Its result is logged.
    pub(super) fn after(&self, event: &Value) {
        let Both { after, timeout, .. } = self.both.read().clone();
        if let Some(hook) = after
            && let Err(error) = call(hook, "after", event, timeout)
        {
            tracing::warn!(target: "glake::regions", %error, "a hook failed after memory was moved");
        }
    }

    /// Calls the hook after an operation with its report or error.
    pub(super) fn after_report(&self, event: &mut Value, report: std::result::Result<Value, &ProcessError>) {
        match report {
            Ok(report) => event["report"] = report,
            Err(error) => event["error"] = error.to_string().into(),
        }
        self.after(event);
    }
}

fn tell(hook: Option<Hook>, when: &'static str, mut event: Value) {
    event["when"] = when.into();
    let answer = hook.map_or(0, |hook| hook(&event.to_string()));
    if answer != 0 {
        tracing::warn!(target: "glake::regions", answer, when, "a hook refused what does not wait for it");
    }
}

fn call(hook: Hook, when: &'static str, event: &Value, timeout: Option<Duration>) -> Result<()> {
    let (sender, receiver) = sync_channel(1);
    let mut event = event.clone();
    event["when"] = when.into();
    let text = event.to_string();
    let run = move || {
        let answer = hook(&text);
        // Dropped here, because its destructor is the program's code too.
        drop(hook);
        // Fails only after a timeout.
        let _ = sender.send(answer);
    };
    let named = std::thread::Builder::new().name("glake-hook".to_owned());
    named.spawn(run).map_err(|source| ProcessError::NoThread { what: "hooks", source })?;
    let answer = match timeout {
        Some(timeout) => receiver.recv_timeout(timeout),
        None => receiver.recv().map_err(RecvTimeoutError::from),
    };
    match (answer, timeout) {
        (Ok(0), _) => Ok(()),
        (Ok(answer), _) => Err(hook_refused(when, &format!("with {answer}"))),
        (Err(RecvTimeoutError::Timeout), Some(timeout)) => Err(ProcessError::timeout(format!(
            "the hook {when} took longer than {timeout:.1?}: nothing was moved where it comes before; allow it more time, or mend it"
        ))),
        (Err(_), _) => Err(hook_refused(when, "without an answer")),
    }
}

fn hook_refused(when: &str, answer: &str) -> ProcessError {
    ProcessError::closed(format!(
        "the hook {when} refused {answer}: nothing was moved where it comes before; see what it said, or set another"
    ))
}

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Both { before, after, timeout } = self.both.read().clone();
        let mut shown = f.debug_struct("Hooks");
        shown.field("before", &before.is_some()).field("after", &after.is_some());
        shown.field("timeout", &timeout).finish()
    }
}

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
    /// Declares the live bytes of a block; `None` means all bytes.
    pub(super) fn declare(
        &self,
        pool: &GpuPool,
        address: Address,
        ranges: Option<&[ByteRange]>,
    ) -> Result<()> {
        match ranges {
            Some(ranges) => pool.live_bytes().set(address, ranges)?,
            None => pool.live_bytes().clear(address)?,
        }
        self.forget();
        Ok(())
    }

    /// Sets the callback of a block.
    pub(super) fn ask(&self, pool: Arc<GpuPool>, address: Address, call: LiveCallback) -> Result<()> {
        let answer = pool.live_bytes().ask(address)?;
        self.all.lock().push(Asked { pool, address, answer, call });
        self.forget();
        Ok(())
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
