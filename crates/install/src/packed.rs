//! Data of the release, compressed in the program and unpacked piece by piece.
//!
//! Unpacked all at once the definitions alone are megabytes of JSON, and as trees many times that.

use std::io::{BufRead, BufReader, Read};

use flate2::read::GzDecoder;
use serde::de::DeserializeOwned;
use vitivirt_api::{Failure, reason};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packed(&'static [u8]);

impl Packed {
    pub(crate) const fn new(bytes: &'static [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn parse<T: DeserializeOwned>(self) -> Result<T, Failure> {
        let mut text = Vec::new();
        GzDecoder::new(self.0).read_to_end(&mut text).map_err(damaged)?;
        serde_json::from_slice(&text).map_err(damaged)
    }

    /// The lines one after the other; only one of them is in memory.
    pub(crate) fn lines(self) -> impl Iterator<Item = Result<String, Failure>> {
        BufReader::new(GzDecoder::new(self.0)).lines().map(|line| line.map_err(damaged))
    }
}

fn damaged(error: impl std::fmt::Display) -> Failure {
    Failure::bug(reason::UNREADABLE_ANSWER, format!("the release's data in this program cannot be read: {error}"))
}
