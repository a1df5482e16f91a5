//! Common part of all copies: try the engine if the copy is large enough, else call the real function.

use std::ffi::{c_int, c_void};

use crate::engine::{self, Answer};
use crate::last_error;
use crate::real::Home;

/// A copy as passed to the engine.
pub(crate) struct Copy {
    pub(crate) to: *mut c_void,
    pub(crate) from: *const c_void,
    pub(crate) size: usize,
    pub(crate) stream: *mut c_void,
    pub(crate) flags: u32,
}

/// Tries the engine, and makes the copy natively if it does not take it.
#[cold]
pub(crate) fn try_engine(home: Home, copy: &Copy, native: impl FnOnce() -> c_int) -> c_int {
    match engine::ask(home, copy) {
        Answer::Taken => 0,
        // Copies made by the real function bypass the engine: it was tried for the outer one.
        Answer::Native => engine::unasked(native),
        Answer::Failed(error) => {
            if home == Home::Runtime {
                last_error::keep(error);
            }
            error
        }
    }
}

/// Defines copy functions of a library, each under the real one's name. `stream`, `flags` and `asked` may use the parameters of the
/// function.
macro_rules! copies {
    ($home:expr; $($name:ident($($more:ident: $type:ty),*): stream $stream:expr, flags $flags:expr, asked $asked:expr;)*) => {$(
        #[doc = concat!("Interposes the real `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// The contract of the real function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            to: *mut ::std::ffi::c_void,
            from: *const ::std::ffi::c_void,
            size: usize,
            $($more: $type,)*
        ) -> ::std::ffi::c_int {
            type Function = unsafe extern "C" fn(
                *mut ::std::ffi::c_void, *const ::std::ffi::c_void, usize $(, $type)*
            ) -> ::std::ffi::c_int;
            static REAL: $crate::real::Real<Function> = $crate::real::real!($home, stringify!($name));
            let native = move || match REAL.get() {
                // SAFETY: the caller's arguments, as they are.
                Some(real) => unsafe { real(to, from, size $(, $more)*) },
                None => $crate::real::NOT_FOUND,
            };
            if size < $crate::engine::least() {
                return native();
            }
            if !$asked {
                return $crate::engine::unasked(native);
            }
            let copy = $crate::copy::Copy { to, from, size, stream: $stream, flags: $flags };
            $crate::copy::try_engine($home, &copy, native)
        }
    )*};
}

pub(crate) use copies;
