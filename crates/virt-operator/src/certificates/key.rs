//! A key on the curve P-256, written as the reference writes it (SEC 1), read in either of the two usual forms.

use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use vitivirt_api::Failure;
use x509_parser::der_parser::{ber::BerObject, parse_der};

use super::NOT_ISSUED;

const SIZE: usize = 32;
const PUBLIC_SIZE: usize = 1 + 2 * SIZE;

/// A private key with its public one. It has no `Debug`.
pub(crate) struct Key {
    secret: [u8; SIZE],
    public: [u8; PUBLIC_SIZE],
    pair: KeyPair,
}

impl Key {
    /// A new one, from the system's randomness.
    pub(crate) fn generate() -> Result<Self, Failure> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| failure(&error))?;
        secret(pair.serialized_der())
            .and_then(|secret| Self::new(secret, pair.public_key_raw()))
            .ok_or_else(|| Failure::bug(NOT_ISSUED, "a key was generated that cannot be read"))
    }

    /// The private half of this public key; nothing else is it.
    pub(super) fn read(pem: &[u8], public: &[u8]) -> Option<Self> {
        let blocks = pem::parse_many(pem).ok()?;
        let block = blocks.iter().find(|block| ["EC PRIVATE KEY", "PRIVATE KEY"].contains(&block.tag()))?;
        Self::new(secret(block.contents())?, public)
    }

    fn new(secret: [u8; SIZE], public: &[u8]) -> Option<Self> {
        let public: [u8; PUBLIC_SIZE] = public.try_into().ok()?;
        let pkcs8 = [PKCS8_HEAD, &secret, PKCS8_MIDDLE, &public].concat();
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8.into(), &PKCS_ECDSA_P256_SHA256).ok()?;
        Some(Self { secret, public, pair })
    }

    pub(super) fn to_pem(&self) -> Vec<u8> {
        let sec1 = [SEC1_HEAD, &self.secret, SEC1_MIDDLE, &self.public].concat();
        encode("EC PRIVATE KEY", sec1).into_bytes()
    }

    pub(super) fn pair(&self) -> &KeyPair {
        &self.pair
    }
}

pub(super) fn failure(error: &rcgen::Error) -> Failure {
    Failure::bug(NOT_ISSUED, format!("a certificate could not be made: {error}"))
}

pub(super) fn encode(tag: &str, der: Vec<u8>) -> String {
    pem::encode_config(&Pem::new(tag, der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

// A key of this curve has one size, so all that surrounds it is constant: RFC 5915, and RFC 5958 around it.
const SEC1_HEAD: &[u8] = &[0x30, 0x77, 0x02, 0x01, 0x01, 0x04, 0x20];
const SEC1_MIDDLE: &[u8] =
    &[0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0xa1, 0x44, 0x03, 0x42, 0x00];
const PKCS8_HEAD: &[u8] = &[
    0x30, 0x81, 0x87, 0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08,
    0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x04, 0x6d, 0x30, 0x6b, 0x02, 0x01, 0x01, 0x04, 0x20,
];
const PKCS8_MIDDLE: &[u8] = &[0xa1, 0x44, 0x03, 0x42, 0x00];

fn secret(der: &[u8]) -> Option<[u8; SIZE]> {
    let fields = |der| -> Option<Vec<BerObject<'_>>> { parse_der(der).ok()?.1.as_sequence().ok().cloned() };
    let outer = fields(der)?;
    // PKCS #8 has the algorithm where SEC 1 has the key.
    match outer.get(1)?.as_slice() {
        Ok(secret) => secret.try_into().ok(),
        Err(_) => fields(outer.get(2)?.as_slice().ok()?)?.get(1)?.as_slice().ok()?.try_into().ok(),
    }
}
