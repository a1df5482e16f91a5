//! A site that offloads: what its passes were, and what follows for the next one.

mod leaves;
#[allow(clippy::module_inception)] // the folder's noun has a file
mod site;

pub use site::Site;
