//! A site that offloads: what its passes were, and what follows for the next one.

mod held;
mod leaves;
mod measured;
mod plans;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod site;

pub use measured::Measured;
pub use site::Site;
