//! Data of the KubeVirt release, compressed in the program and decompressed piece by piece.
//!
//! The CRDs alone are megabytes of JSON, and many times that as trees of values.

use std::io::{BufRead, BufReader, Read};

use flate2::read::GzDecoder;
use serde::de::DeserializeOwned;
use vitivirt_api::{Failure, reason};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompressedAsset(&'static [u8]);

impl CompressedAsset {
    pub(crate) const fn new(bytes: &'static [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(self) -> &'static [u8] {
        self.0
    }

    pub(crate) fn parse<T: DeserializeOwned>(self) -> Result<T, Failure> {
        let mut text = Vec::new();
        GzDecoder::new(self.0).read_to_end(&mut text).map_err(damaged)?;
        serde_json::from_slice(&text).map_err(damaged)
    }

    /// The lines, of which one at a time is in memory.
    pub(crate) fn lines(self) -> impl Iterator<Item = Result<String, Failure>> {
        BufReader::new(GzDecoder::new(self.0)).lines().map(|line| line.map_err(damaged))
    }
}

fn damaged(error: impl std::fmt::Display) -> Failure {
    Failure::bug(reason::UNREADABLE_ANSWER, format!("the release data in this program cannot be read: {error}"))
}
