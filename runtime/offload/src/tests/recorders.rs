//! Passes as a recorder gets them.
