//! An object of a list or a watch that may not have the form that the program expects. One such object, for example of
//! another version of a CRD, does not fail the list of all objects: the cache skips it and reports its name.

use std::{borrow::Cow, marker::PhantomData};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Resource, core::DynamicResourceScope};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error},
};
use serde_json::Value;

#[derive(Clone, Debug)]
pub(super) enum Parsed<K> {
    Readable(K),
    /// Only what identifies the object.
    Unreadable(Box<ObjectMeta>),
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Parsed<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        match K::deserialize(&value) {
            Ok(object) => Ok(Self::Readable(object)),
            // The error may quote the object, so it is dropped.
            Err(_) => identity(&value)
                .map(|metadata| Self::Unreadable(Box::new(metadata)))
                .ok_or_else(|| D::Error::custom("an object has no name or no resourceVersion")),
        }
    }
}

fn identity(object: &Value) -> Option<ObjectMeta> {
    let text = |field: &str| object.pointer(&format!("/metadata/{field}")).and_then(Value::as_str).map(str::to_owned);
    Some(ObjectMeta {
        name: Some(text("name")?),
        resource_version: Some(text("resourceVersion")?),
        namespace: text("namespace"),
        uid: text("uid"),
        ..ObjectMeta::default()
    })
}

/// The URL of a kind, which is all that a list and a watch need to know about it.
pub(super) struct Location<K> {
    url: String,
    kind: PhantomData<fn() -> K>,
}

/// The same objects, of which some may be unreadable.
pub(super) fn parsed_api<K: Resource + 'static>(api: Api<K>) -> Api<Parsed<K>> {
    let location = Location { url: api.resource_url().to_owned(), kind: PhantomData };
    Api::all_with(api.into_client(), &location)
}

impl<K: Resource + 'static> Resource for Parsed<K> {
    type DynamicType = Location<K>;
    type Scope = DynamicResourceScope;

    fn kind(_: &Location<K>) -> Cow<'_, str> {
        "".into()
    }

    fn group(_: &Location<K>) -> Cow<'_, str> {
        "".into()
    }

    fn version(_: &Location<K>) -> Cow<'_, str> {
        "".into()
    }

    fn plural(_: &Location<K>) -> Cow<'_, str> {
        "".into()
    }

    fn metadata_api() -> bool {
        K::metadata_api()
    }

    fn url_path(location: &Location<K>, _: Option<&str>) -> String {
        location.url.clone()
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Readable(object) => object.meta(),
            Self::Unreadable(metadata) => metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Readable(object) => object.meta_mut(),
            Self::Unreadable(metadata) => metadata,
        }
    }
}
