/*
 * Attach tokens of groups.
 *
 * A token is in memory only while a request that brings it is looked at.  What the group's spec has, in the store and in
 * every server, is its salted hash; a settled spec, which workers and operators see, says only that there is one.
 *
 * The hash is yescrypt at its lowest cost, 1 ms: it is computed on the loop's thread, for each claim.  Tokens should be
 * random, and then no hash is too fast; those that are not are guessed at no more than GUESSES a second.
 */
#include <crypt.h>
#include <stdlib.h>
#include <string.h>

#include "ep_secret.h"
#include "group_private.h"

#define METHOD  "$y$"
#define COST    1u
#define GUESSES 10u /* wrong tokens of one user in a second, over all groups of this server */

#define STATE(name) EP__V1__ATTACH_TOKEN__STATE_##name

/* ---- hashes -------------------------------------------------------------------------------------- */

/* Of that salt, or of the salt that a hash begins with; `out` is empty where there is none. */
static void hash_of(const char *token, const char *salt, char out[static CRYPT_OUTPUT_SIZE])
{
    struct crypt_data data;
    const char *hash;

    memset(&data, 0, sizeof data);
    hash = crypt_rn(token, salt, &data, sizeof data);
    out[0] = '\0';
    if (hash && strlen(hash) < CRYPT_OUTPUT_SIZE)
        memcpy(out, hash, strlen(hash) + 1);
    explicit_bzero(&data, sizeof data);
}

/* In constant time for hashes of one length, which those of one method are. */
static bool same_hash(const char *a, const char *b)
{
    const size_t n = strlen(a);
    unsigned difference = 0;

    if (!n || strlen(b) != n)
        return false;
    for (size_t i = 0; i < n; i++)
        difference |= (unsigned)(a[i] ^ b[i]);
    return difference == 0;
}

static bool is_right(const char *token, const char *hash)
{
    char given[CRYPT_OUTPUT_SIZE];

    hash_of(token, hash, given);
    return same_hash(given, hash);
}

/* ---- what is asked for ----------------------------------------------------------------------------- */

static ep_status check_size(const char *token, struct ep_error *error)
{
    const size_t n = strlen(token);

    if (n >= 1 && n <= EP_ATTACH_TOKEN_MAX)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "attach_token.token has %zu bytes: must have 1 to %u", n,
                        EP_ATTACH_TOKEN_MAX);
}

/* protobuf-c gives an empty text to a field that has none: that is not ours to free. */
static void free_text(char *text)
{
    if (text == protobuf_c_empty_string)
        return;
    explicit_bzero(text, strlen(text));
    free(text);
}

static ep_status seal(Ep__V1__AttachToken *token, struct ep_error *error)
{
    char salt[CRYPT_GENSALT_OUTPUT_SIZE], hash[CRYPT_OUTPUT_SIZE] = "";
    ep_status status = check_size(token->token, error);

    if (status)
        return status;
    if (crypt_gensalt_rn(METHOD, COST, NULL, 0, salt, sizeof salt))
        hash_of(token->token, salt, hash);
    if (!*hash)
        return ep_error_errno(error, EP_INTERNAL, "attach_token: cannot be hashed");
    free_text(token->token);
    token->hash = group_copy(hash);
    token->state_case = STATE(HASH);
    return EP_OK;
}

static ep_status refuse_hash(struct ep_error *error)
{
    return ep_error_set(error, EP_INVALID_ARGUMENT,
                        "attach_token.hash is given: servers alone give it to each other; give attach_token.token");
}

ep_status ep_groups_seal_token(Ep__V1__GroupSpec *spec, bool by_server, struct ep_error *error)
{
    Ep__V1__AttachToken *token = spec->attach_token;
    const unsigned state = token ? token->state_case : 0;

    if (state == STATE(TOKEN))
        return seal(token, error);
    if (state == STATE(HASH) && !by_server)
        return refuse_hash(error);
    if (state == STATE(HASH) || (state == STATE(SET) && token->set))
        return EP_OK;
    if (token)
        ep__v1__attach_token__free_unpacked(token, NULL);
    spec->attach_token = NULL;
    return EP_OK;
}

ep_status token_keep(Ep__V1__GroupSpec *to, const Ep__V1__GroupSpec *from, struct ep_error *error)
{
    ep_status status = token_given(to, from, error);

    if (status || !to->attach_token || to->attach_token->state_case != STATE(SET))
        return status;
    ep__v1__attach_token__free_unpacked(to->attach_token, NULL);
    to->attach_token = ep_message_copy(&from->attach_token->base);
    return EP_OK;
}

ep_status token_given(const Ep__V1__GroupSpec *asked, const Ep__V1__GroupSpec *from, struct ep_error *error)
{
    if (!asked->attach_token || asked->attach_token->state_case != STATE(SET) || (from && from->attach_token))
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "attach_token.set is true: the group has no token that it could keep; "
                        "give attach_token.token, or leave attach_token out");
}

/* ---- who claims ------------------------------------------------------------------------------------- */

/* What is known of a user in the present second; whoever was last heard of the longest ago gives way. */
static struct token_guesser *guesser_of(struct ep_groups *groups, uid_t uid)
{
    const uint64_t second = group_now(groups) / 1000;
    struct token_guesser *by = groups->guesses.by, *found = by;

    for (uint32_t i = 0; i < TOKEN_GUESSERS; i++) {
        if (by[i].uid == uid && by[i].second == second)
            return &by[i];
        if (by[i].second < found->second)
            found = &by[i];
    }
    *found = (struct token_guesser){ .uid = uid, .second = second };
    return found;
}

#define HOW_TO_GIVE                                                                                                    \
    "ep_join_options.token, or a file that EP_ATTACH_TOKEN_FILE names (--token-file of worker and ep-bench)"

ep_status token_check(struct group *group, const struct ep_worker *worker, struct ep_error *error)
{
    const Ep__V1__AttachToken *token = group->asked ? group->asked->attach_token : NULL;
    const char *given = worker->token ? worker->token : "";
    struct token_guesser *guesser;

    if (!token || worker->after) /* who follows holds a rank of the group: find_held() */
        return EP_OK;
    if (!*given)
        return ep_error_set(error, EP_PERMISSION_DENIED, "group %s wants an attach token: give it by " HOW_TO_GIVE,
                            group->name);
    guesser = guesser_of(group->groups, worker->uid);
    if (guesser->wrong >= GUESSES)
        return ep_error_set(error, EP_UNAVAILABLE,
                            "group %s wants an attach token, and uid %u has given %u wrong ones within a second: try again",
                            group->name, (unsigned)worker->uid, guesser->wrong);
    if (token->state_case == STATE(HASH) && strlen(given) <= EP_ATTACH_TOKEN_MAX && is_right(given, token->hash))
        return EP_OK;
    guesser->wrong++;
    return ep_error_set(error, EP_PERMISSION_DENIED, "that is not the attach token of group %s: give it by " HOW_TO_GIVE,
                        group->name);
}
