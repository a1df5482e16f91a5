//! Which interface and which release a library is of.

use std::borrow::Cow;
use std::fmt;

/// The number of this interface: raised when a structure or a signature changes.
pub const ABI: u32 = 2;

/// A library's interface and release. Displayed as `release 0.1.0 with interface 2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The number that `glake_abi` answers.
    pub interface: u32,
    /// The text that `glake_version` answers.
    pub release: Cow<'static, str>,
}

impl Version {
    /// This build's.
    pub const OURS: Version = Version { interface: ABI, release: Cow::Borrowed(env!("CARGO_PKG_VERSION")) };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "release {} with interface {}", self.release, self.interface)
    }
}
