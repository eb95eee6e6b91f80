//! The status pages of both operators: read-only HTML for a person who forwards a port of the pod.
//!
//! A page is rendered on the server, refreshes itself and needs no script. Everything on it comes from caches and the
//! last reports, so a page sends no request to the API server. This crate has what both pages share: the
//! frame and the style ([`layout`]), parts of pages ([`parts`]), and the rules for requests ([`server`]). The operators
//! supply the content ([`Pages`]).
//!
//! Who may see a page: it listens on the loopback of the pod only, so it needs the permission `pods/portforward` in the
//! namespace of the operator. A website in the same browser cannot read it: the server refuses a `Host` that is not
//! loopback (DNS rebinding) and allows no embedding.

pub mod layout;
pub mod parts;
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;

pub use layout::{Page, PageHeader};
pub use server::{ADDRESS_EXPECTED, PageRequest, Pages, loopback_address, start};
