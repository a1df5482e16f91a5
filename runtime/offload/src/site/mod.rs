//! Offload site: history of its passes, and decisions for the next one.

mod held;
mod leaves;
mod plans;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod site;

pub use held::Measured;
pub use site::Site;
