//! The stitching allocator's pure core: requests in, plans out.
