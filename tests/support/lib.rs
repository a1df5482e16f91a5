//! Test support: a pool on a simulated GPU, a simulated server with a copy engine, and the models that tests compare them with.

pub mod pool;
pub mod transfer;
