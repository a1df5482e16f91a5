//! Sets the linker options of the library.

fn main() {
    // A handler of fork is in it, and programs keep pointers to its functions: it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Its calls to itself stay its own, whatever else is preloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libglake_preload.so");
}
