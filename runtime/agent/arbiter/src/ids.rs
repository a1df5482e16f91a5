//! Who and where.

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
    /// A process that joined, for as long as it lives; the agent never gives a number twice.
    WorkerId(u64)
);
id!(
    /// What runs or does not run as a whole: a worker, or all ranks of one launcher.
    GangId(u64)
);
id!(
    /// A GPU of the server, by its place.
    GpuId(u16)
);
