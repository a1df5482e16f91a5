//! Version of a library: its interface and its release.

use std::borrow::Cow;
use std::fmt;

/// Number of the interface, raised when a structure or a signature changes.
pub const ABI: u32 = 2;

/// Interface and release of a library. Displayed as `release 0.1.0 with interface 2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Number returned by `glake_abi`.
    pub interface: u32,
    /// Text returned by `glake_version`.
    pub release: Cow<'static, str>,
}

impl Version {
    /// Version of this build.
    pub const OURS: Version = Version { interface: ABI, release: Cow::Borrowed(env!("CARGO_PKG_VERSION")) };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "release {} with interface {}", self.release, self.interface)
    }
}
