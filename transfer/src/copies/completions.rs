//! Completion of enqueued copies: reported to the clock of the program's contexts and to waiting callers.

use std::sync::Arc;

use glake_device::owned::DeviceSet;

use crate::copies::event_pool::EventPool;
use crate::copies::parts::Parts;
use crate::links::contexts::Contexts;
use crate::{CopyHandle, CopyOptions, Result, TransferError, UserStream};

/// Completion tracking of one engine.
#[derive(Debug)]
pub(crate) struct Completions {
    contexts: Arc<Contexts>,
    marks: Arc<EventPool>,
}

impl Completions {
    pub(crate) fn new(contexts: &Arc<Contexts>, marks: &Arc<EventPool>) -> Arc<Completions> {
        Arc::new(Completions { contexts: contexts.clone(), marks: marks.clone() })
    }

    /// Includes a copy on a program's stream in later completion points, also after an error: a part of the copy may be enqueued.
    pub(crate) fn covered<T>(&self, enqueued: Result<T>, memory: DeviceSet, on: UserStream) -> Result<T> {
        let told = self.contexts.program().enqueued_on(memory, (on.device, on.raw));
        let enqueued = enqueued?;
        told?;
        Ok(enqueued)
    }

    /// Returns a handle for a copy that was just enqueued.
    pub(crate) fn handle(
        &self,
        on: UserStream,
        options: CopyOptions,
        parts: Option<Parts>,
    ) -> Result<CopyHandle> {
        if options.waited {
            match self.marks.mark(on).or_else(|_| self.marks.mark(on)) {
                Ok(mark) => return Ok(CopyHandle::marked(mark, parts)),
                Err(TransferError::Driver(error)) if !error.is_sticky() => {
                    tracing::debug!(target: "glake::transfer", %error, "a handle waits for its whole stream");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(CopyHandle::unmarked(self.contexts.driver(), on, parts))
    }
}
