//! GPU pools over a driver.
