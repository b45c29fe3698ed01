//! Which build this is.

/// The version of the package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit that it was built from; `unknown` if there was no repository.
pub const REVISION: &str = env!("BUILD_REVISION");

/// Both.
pub const VERSION_AND_REVISION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("BUILD_REVISION"), ")");
