//! An object of a list or a watch that may not have the form that the program expects. One such object, for example of
//! another version of a CRD, does not fail the list of all objects: the cache skips it and reports its name.

use std::{borrow::Cow, fmt, marker::PhantomData};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Resource, core::DynamicResourceScope};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

#[derive(Clone, Debug)]
pub(super) enum Parsed<K> {
    Readable(K),
    /// Only what identifies the object.
    Unreadable(Box<ObjectMeta>),
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Parsed<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Shallow(MAX_DEPTH).deserialize(deserializer)?;
        match K::deserialize(&value) {
            Ok(object) => Ok(Self::Readable(object)),
            // The error may quote the object, so it is dropped.
            Err(_) => identity(&value)
                .map(|metadata| Self::Unreadable(Box::new(metadata)))
                .ok_or_else(|| D::Error::custom("an object has no name or no resourceVersion")),
        }
    }
}

/// Less than the depth at which `serde_json` fails, with the list or the event around the object. The API server accepts any
/// depth in `metadata.managedFields` and in fields without a schema, so any user who can write one object could otherwise
/// make every list of its kind unreadable. Nothing that the operators read is as deep.
const MAX_DEPTH: usize = 120;

/// Reads JSON up to a depth. What is deeper is skipped and becomes null.
#[derive(Clone, Copy)]
struct Shallow(usize);

impl<'de> DeserializeSeed<'de> for Shallow {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        if self.0 == 0 {
            // Skipping does not recurse.
            return IgnoredAny::deserialize(deserializer).map(|_| Value::Null);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Shallow {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Self(self.0 - 1))? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            object.insert(name, fields.next_value_seed(Self(self.0 - 1))?);
        }
        Ok(object.into())
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
