//! Identifiers of workers, gangs and GPUs.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $number);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Number of a process that joined, valid for its lifetime; the agent never reuses a number.
    WorkerId(u64)
);
id!(
    /// Number of a gang: a single worker, or all ranks of one launcher.
    GangId(u64)
);
id!(
    /// Index of a GPU of the server.
    GpuId(u16)
);
