//! Offload site: history of its passes, and decisions for the next one.

mod held;
mod leaves;
mod measured;
mod plans;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod site;

pub use measured::Measured;
pub use site::Site;
