//! Compiles the C++ shim for torch's signatures, and sets the linker options of the library.

fn main() {
    println!("cargo::rerun-if-changed=src/shim.cpp");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("src/shim.cpp")
        .flag("-fvisibility=hidden")
        .compile("gmlake_shim");
    // Threads of ours run this code, and handlers of fork and exit are in it: it is never unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A copy that was loaded before, globally, must not answer this one's own calls.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgmlake.so");
}
