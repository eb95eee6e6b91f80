//! How an object is named inside caches and queues: by namespace and name, not by UID, because that is what watch
//! events and references of other objects contain.

use std::{cmp::Ordering, fmt};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace and name of an object; the namespace of a cluster-scoped object is empty.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey(
    /// `namespace/name`; neither contains a slash. Caches and queues hold several keys for each of ten thousand
    /// objects, so a key is one allocation instead of two.
    Box<str>,
);

impl ObjectKey {
    pub fn namespaced(namespace: &str, name: &str) -> Self {
        Self(format!("{namespace}/{name}").into())
    }

    pub fn cluster(name: &str) -> Self {
        Self::namespaced("", name)
    }

    pub fn from_metadata(metadata: &ObjectMeta) -> Self {
        Self::namespaced(
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        )
    }

    /// The key of another object in the same namespace.
    #[must_use]
    pub fn sibling(&self, name: &str) -> Self {
        Self::namespaced(self.parts().0, name)
    }

    pub fn namespace(&self) -> Option<&str> {
        Some(self.parts().0).filter(|namespace| !namespace.is_empty())
    }

    pub fn name(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or_default()
    }
}

/// Ordered by namespace, then by name: `a/z` is less than `a-b/c`, although `-` sorts before `/`.
impl Ord for ObjectKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.parts().cmp(&other.parts())
    }
}

impl PartialOrd for ObjectKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.strip_prefix('/').unwrap_or(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_a_namespace_and_a_name() {
        let (inside, outside) = (ObjectKey::namespaced("shop", "web"), ObjectKey::cluster("system:node"));
        assert_eq!((inside.namespace(), inside.name(), inside.to_string().as_str()), (Some("shop"), "web", "shop/web"));
        assert_eq!((outside.namespace(), outside.name()), (None, "system:node"));
        assert_eq!(outside.to_string(), "system:node");
        assert_eq!(inside.sibling("db"), ObjectKey::namespaced("shop", "db"));
        assert_eq!(outside.sibling("other"), ObjectKey::cluster("other"));
    }

    #[test]
    fn keys_of_one_namespace_sort_together() {
        let mut keys = [("a-b", "c"), ("a", "z"), ("", "n"), ("a", "b")].map(|(a, b)| ObjectKey::namespaced(a, b));
        keys.sort();
        assert_eq!(keys.map(|key| key.to_string()), ["n", "a/b", "a/z", "a-b/c"]);
    }
}
