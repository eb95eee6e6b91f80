//! Private keys on the curve P-256. They are written in SEC 1, as upstream virt-operator writes them, and read in SEC 1
//! or PKCS #8.

use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use vitivirt_api::Failure;
use x509_parser::der_parser::{ber::BerObject, parse_der};

use super::NOT_ISSUED;

const SIZE: usize = 32;
const PUBLIC_SIZE: usize = 1 + 2 * SIZE;

/// A private key with its public key. It has no `Debug`, because it must not be logged.
pub(crate) struct Key {
    secret: [u8; SIZE],
    public: [u8; PUBLIC_SIZE],
    pair: KeyPair,
}

impl Key {
    /// Generates a key from the system's random number generator.
    pub(crate) fn generate() -> Result<Self, Failure> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| issue_error(&error))?;
        private_scalar(pair.serialized_der())
            .and_then(|secret| Self::new(secret, pair.public_key_raw()))
            .ok_or_else(|| Failure::bug(NOT_ISSUED, "the generated private key cannot be parsed"))
    }

    /// Parses the private key that belongs to `public`. `None` if it belongs to another public key.
    pub(super) fn from_pem(pem: &[u8], public: &[u8]) -> Option<Self> {
        let blocks = pem::parse_many(pem).ok()?;
        let block = blocks.iter().find(|block| ["EC PRIVATE KEY", "PRIVATE KEY"].contains(&block.tag()))?;
        Self::new(private_scalar(block.contents())?, public)
    }

    fn new(secret: [u8; SIZE], public: &[u8]) -> Option<Self> {
        let public: [u8; PUBLIC_SIZE] = public.try_into().ok()?;
        let pkcs8 = [PKCS8_HEAD, &secret, PKCS8_MIDDLE, &public].concat();
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8.into(), &PKCS_ECDSA_P256_SHA256).ok()?;
        Some(Self { secret, public, pair })
    }

    pub(super) fn to_pem(&self) -> Vec<u8> {
        let sec1 = [SEC1_HEAD, &self.secret, SEC1_MIDDLE, &self.public].concat();
        encode_pem("EC PRIVATE KEY", sec1).into_bytes()
    }

    pub(super) fn pair(&self) -> &KeyPair {
        &self.pair
    }
}

pub(super) fn issue_error(error: &rcgen::Error) -> Failure {
    Failure::bug(NOT_ISSUED, format!("certificate could not be issued: {error}"))
}

pub(super) fn encode_pem(tag: &str, der: Vec<u8>) -> String {
    pem::encode_config(&Pem::new(tag, der), EncodeConfig::new().set_line_ending(LineEnding::LF))
}

// All keys of this curve have the same size, so the bytes around a key are constant: SEC 1 (RFC 5915), and PKCS #8
// (RFC 5958) around that.
const SEC1_HEAD: &[u8] = &[0x30, 0x77, 0x02, 0x01, 0x01, 0x04, 0x20];
const SEC1_MIDDLE: &[u8] =
    &[0xa0, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0xa1, 0x44, 0x03, 0x42, 0x00];
const PKCS8_HEAD: &[u8] = &[
    0x30, 0x81, 0x87, 0x02, 0x01, 0x00, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08,
    0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x04, 0x6d, 0x30, 0x6b, 0x02, 0x01, 0x01, 0x04, 0x20,
];
const PKCS8_MIDDLE: &[u8] = &[0xa1, 0x44, 0x03, 0x42, 0x00];

/// The private scalar of a key in SEC 1 or PKCS #8.
fn private_scalar(der: &[u8]) -> Option<[u8; SIZE]> {
    let fields = |der| -> Option<Vec<BerObject<'_>>> { parse_der(der).ok()?.1.as_sequence().ok().cloned() };
    let outer = fields(der)?;
    // The second field is the key in SEC 1 and the algorithm in PKCS #8.
    match outer.get(1)?.as_slice() {
        Ok(secret) => secret.try_into().ok(),
        Err(_) => fields(outer.get(2)?.as_slice().ok()?)?.get(1)?.as_slice().ok()?.try_into().ok(),
    }
}
