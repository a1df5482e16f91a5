//! What a program gives with a function of its own, and gets back when that is called.

use std::ffi::c_void;

/// A pointer that is handed to the program's function on any thread, and never followed here.
#[derive(Clone, Copy)]
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: who gives a function and its context promises that it may be called on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, and on several at once.
unsafe impl Sync for Context {}

impl Context {
    /// A method, so that a closure takes hold of all of it and not of the pointer alone.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}
