//! A certificate in a folder, usually a mounted Secret of type `kubernetes.io/tls`.
//!
//! The kubelet replaces the files when the Secret changes. The folder is read at an interval, because a watch of files
//! misses changes of some volumes. A file that cannot be read or used changes nothing: the next connections keep the
//! last valid certificate.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::sleep;

use super::{Acceptor, PemKeyPair, ReloadableTls, TlsError, TlsPolicy};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
/// The kubelet updates a mounted Secret within a minute or two, so more often would gain nothing.
const INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum MountedCertificateError {
    #[error("cannot read {}: {cause}; the folder must contain {CERTIFICATE} and {KEY}", path.display())]
    Unreadable { path: PathBuf, cause: io::Error },
    #[error("{} and {KEY} cannot be used: {cause}; both must be PEM and belong together", path.display())]
    Unusable { path: PathBuf, cause: TlsError },
}

/// The certificate of a folder. Clones share it.
#[derive(Clone)]
pub struct MountedCertificate {
    folder: PathBuf,
    tls: ReloadableTls,
}

impl MountedCertificate {
    /// Reads the folder. A program without its certificate must not start.
    pub fn load(folder: &Path) -> Result<Self, MountedCertificateError> {
        let file = |name| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|cause| MountedCertificateError::Unreadable { path, cause })
        };
        let pair = PemKeyPair { certificate: file(CERTIFICATE)?, key: file(KEY)? };
        let unusable = |cause| MountedCertificateError::Unusable { path: folder.join(CERTIFICATE), cause };
        let tls = ReloadableTls::new(&pair).map_err(unusable)?;
        Ok(Self { folder: folder.to_owned(), tls })
    }

    pub fn acceptor(&self) -> Acceptor {
        self.tls.acceptor()
    }

    /// Serves new connections with the certificate that the folder has, for as long as the program runs.
    pub async fn reload(self) {
        let mut was_readable = true;
        loop {
            sleep(INTERVAL).await;
            match self.read().await {
                Ok(pair) => {
                    was_readable = true;
                    self.tls.set(Some(pair), TlsPolicy::default());
                }
                Err(error) => {
                    if was_readable {
                        tracing::warn!(error = %error, "unreadable certificate, keeping the previous one");
                    }
                    was_readable = false;
                }
            }
        }
    }

    async fn read(&self) -> Result<PemKeyPair, MountedCertificateError> {
        let file = async |name| {
            let path = self.folder.join(name);
            let contents = tokio::fs::read(&path).await;
            contents.map_err(|cause| MountedCertificateError::Unreadable { path, cause })
        };
        Ok(PemKeyPair { certificate: file(CERTIFICATE).await?, key: file(KEY).await? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, pair: &PemKeyPair) {
        std::fs::write(folder.join(CERTIFICATE), &pair.certificate).unwrap();
        std::fs::write(folder.join(KEY), &pair.key).unwrap();
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_folder_without_a_usable_certificate_is_refused_with_a_reason() {
        let folder = Folder::new("mounted-certificate-refused");
        let error = || MountedCertificate::load(&folder.0).err().unwrap().to_string();
        assert!(error().contains("tls.crt: No such file") && error().contains("must contain tls.crt and tls.key"));
        let (one, other) = (PemKeyPair::self_signed("one").unwrap(), PemKeyPair::self_signed("other").unwrap());
        write(&folder.0, &PemKeyPair { certificate: one.certificate.clone(), key: other.key });
        assert!(error().contains("belong together"), "{}", error());
        write(&folder.0, &PemKeyPair { certificate: b"nothing".to_vec(), key: one.key });
        assert!(error().contains("no valid certificate in PEM format"), "{}", error());
    }

    #[tokio::test(start_paused = true)]
    async fn a_changed_file_is_served_and_a_damaged_or_missing_one_is_not() {
        let folder = Folder::new("mounted-certificate-reload");
        let (first, second) = (PemKeyPair::self_signed("first").unwrap(), PemKeyPair::self_signed("second").unwrap());
        write(&folder.0, &first);
        let mounted = MountedCertificate::load(&folder.0).unwrap();
        let reload = tokio::spawn(mounted.clone().reload());

        std::fs::remove_file(folder.0.join(KEY)).unwrap();
        sleep(INTERVAL * 2).await;
        assert!(mounted.tls.serves(&first));

        write(&folder.0, &second);
        sleep(INTERVAL * 2).await;
        assert!(mounted.tls.serves(&second));

        std::fs::write(folder.0.join(CERTIFICATE), "damaged").unwrap();
        sleep(INTERVAL * 2).await;
        assert!(mounted.tls.serves(&second));
        reload.abort();
    }
}
