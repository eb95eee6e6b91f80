//! The text of `--version`.

use std::sync::LazyLock;

use vitivirt_api::KUBEVIRT_RELEASE;

static VERSION: LazyLock<String> = LazyLock::new(|| {
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("VITIVIRT_COMMIT"));
    format!("{version} (VitiVirt commit {commit}, KubeVirt {KUBEVIRT_RELEASE})")
});

/// Program version, project with its commit, and KubeVirt release, such as
/// `0.1.0 (VitiVirt commit 1a2b3c4d, KubeVirt v1.8.4)`.
pub fn version() -> &'static str {
    VERSION.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_names_the_project_its_commit_and_the_kubevirt_release() {
        let rest = version().strip_prefix(env!("CARGO_PKG_VERSION")).unwrap();
        let commit = rest.strip_prefix(" (VitiVirt commit ").unwrap().strip_suffix(", KubeVirt v1.8.4)").unwrap();
        assert!(!commit.is_empty() && !commit.contains(char::is_whitespace), "{commit:?}");
    }
}
