//! What a clock says, step by step.
