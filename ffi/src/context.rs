//! Context pointers that a program passes with its callbacks and receives in each call.

use std::ffi::c_void;

/// Pointer that is passed to the program's callback on any thread, and never dereferenced here.
#[derive(Clone, Copy)]
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: who gives a function and its context promises that it may be called on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, and on several at once.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the pointer itself. A method, so that closures capture the whole value and not the bare pointer.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}
