//! Objects of a CRD that the operator stores again, page by page.

use serde_json::Value;
use vitivirt_install::{Observed, StoragePage, next_migration};

use super::test_cluster::TestCluster;

/// The objects of a CRD that one reconcile stores again.
const PAGE: usize = 2;

impl TestCluster {
    /// As the operator lists them. Every page is stored.
    pub(crate) fn next_storage_page(&mut self, observed: &Observed) -> Option<StoragePage> {
        let (crd, migration) = next_migration(observed)?;
        let of_kind = self.objects.iter().filter(|((kind, _), _)| *kind == migration.resource.kind);
        let uid = |object: &Value| object["metadata"]["uid"].as_str().unwrap().to_owned();
        let objects: Vec<_> = of_kind.map(|((_, key), object)| (key.clone(), uid(object))).collect();
        let done = self.stored_again;
        let page: Vec<_> = objects.iter().skip(done).take(PAGE).cloned().collect();
        let remaining = objects.len() - done - page.len();
        self.stored_again = if remaining == 0 { 0 } else { done + page.len() };
        Some(StoragePage { crd: crd.clone(), objects: page, done, remaining, is_last: remaining == 0 })
    }
}
