//! Hooks of the program before and after its memory leaves or returns.
//!
//! A hook runs on its own thread, without locks, up to a timeout. After the timeout it keeps running, but its result is ignored. If memory
//! returns because it is touched, hooks are called but not waited for: the touching thread may hold a lock that they need, such as an
//! interpreter's or an allocator's.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use parking_lot::RwLock;
use serde_json::Value;

use super::super::{ProcessError, Result};

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
    /// [`ProcessError::HookRefused`], [`ProcessError::HookTimedOut`]: the operation must be cancelled.
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
        (Ok(answer), _) => Err(ProcessError::HookRefused { when, answer: Some(answer) }),
        (Err(RecvTimeoutError::Timeout), Some(timeout)) => Err(ProcessError::HookTimedOut { when, timeout }),
        (Err(_), _) => Err(ProcessError::HookRefused { when, answer: None }),
    }
}

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Both { before, after, timeout } = self.both.read().clone();
        let mut shown = f.debug_struct("Hooks");
        shown.field("before", &before.is_some()).field("after", &after.is_some());
        shown.field("timeout", &timeout).finish()
    }
}
