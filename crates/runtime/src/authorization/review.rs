//! The two questions to the API server: whose token this is, and whether that user can get the path.

use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec, UserInfo},
    authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
};
use kube::{Api, Client, api::PostParams};

use super::cache::Decision;

pub(super) async fn review(client: &Client, token: &str, path: &str) -> Result<Decision, kube::Error> {
    let reviews: Api<TokenReview> = Api::all(client.clone());
    let reviewed = reviews.create(&PostParams::default(), &token_review(token)).await?;
    let Some(user) = authenticated_user(reviewed) else { return Ok(Decision::Unauthenticated) };
    let name = user.username.clone().unwrap_or_default();
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let reviewed = reviews.create(&PostParams::default(), &access_review(user, path)).await?;
    Ok(if is_allowed(&reviewed) { Decision::Allowed } else { Decision::Forbidden { user: name } })
}

/// Without an audience the API server requires its own, which the token of every service account has by default.
fn token_review(token: &str) -> TokenReview {
    let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
    TokenReview { spec, ..TokenReview::default() }
}

/// The user of a valid token.
fn authenticated_user(review: TokenReview) -> Option<UserInfo> {
    let status = review.status.filter(|status| status.authenticated == Some(true))?;
    status.user.filter(|user| user.username.as_ref().is_some_and(|name| !name.is_empty()))
}

fn access_review(user: UserInfo, path: &str) -> SubjectAccessReview {
    let attributes = NonResourceAttributes { path: Some(path.to_owned()), verb: Some("get".to_owned()) };
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(attributes),
            resource_attributes: None,
        },
        ..SubjectAccessReview::default()
    }
}

fn is_allowed(review: &SubjectAccessReview) -> bool {
    review.status.as_ref().is_some_and(|status| status.allowed && status.denied != Some(true))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn only_a_token_that_is_authenticated_has_a_user() {
        let user = |status: Value| {
            let review: TokenReview = serde_json::from_value(json!({"spec": {}, "status": status})).unwrap();
            authenticated_user(review).and_then(|user| user.username)
        };
        assert_eq!(user(json!({"authenticated": true, "user": {"username": "a"}})).as_deref(), Some("a"));
        for refused in [
            json!(null),
            json!({}),
            json!({"authenticated": false, "user": {"username": "a"}}),
            json!({"user": {"username": "a"}}),
            json!({"authenticated": true}),
            json!({"authenticated": true, "user": {}}),
            json!({"authenticated": true, "user": {"username": ""}}),
        ] {
            assert_eq!(user(refused.clone()), None, "{refused}");
        }
    }

    #[test]
    fn access_requires_an_explicit_permission() {
        let allowed = |status: Value| {
            let review: SubjectAccessReview = serde_json::from_value(json!({"spec": {}, "status": status})).unwrap();
            is_allowed(&review)
        };
        assert!(allowed(json!({"allowed": true})));
        for refused in [json!(null), json!({"allowed": false}), json!({"allowed": true, "denied": true})] {
            assert!(!allowed(refused.clone()), "{refused}");
        }
    }

    #[test]
    fn the_access_review_has_everything_about_the_user() {
        let user: UserInfo = serde_json::from_value(json!({
            "username": "a", "uid": "1", "groups": ["g"], "extra": {"key": ["value"]},
        }))
        .unwrap();
        let spec = serde_json::to_value(access_review(user, "/metrics").spec).unwrap();
        let expected = json!({
            "user": "a", "uid": "1", "groups": ["g"], "extra": {"key": ["value"]},
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        });
        assert_eq!(spec, expected);
    }
}
