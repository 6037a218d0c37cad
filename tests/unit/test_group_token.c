/* Attach tokens: who may claim, and that nobody gets to see one. */
#include "group_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep_secret.h"
#include "spec.h"

#define STATE(name) EP__V1__ATTACH_TOKEN__STATE_##name
#define TOKEN       "3f9c0e-first"
#define OTHER       "3f9c0e-second"

/* As the API does it: *spec has the hash of the token then.  Freed with the spec's token. */
static Ep__V1__AttachToken *token_message(const char *token)
{
    Ep__V1__AttachToken *message = calloc(1, sizeof *message);

    ep__v1__attach_token__init(message);
    message->state_case = STATE(TOKEN);
    message->token = strdup(token);
    return message;
}

static void set_token(Ep__V1__GroupSpec *spec, const char *token)
{
    spec->attach_token = token_message(token);
    assert_int_equal(ep_groups_seal_token(spec, false, NULL), EP_OK);
}

static void drop_token(Ep__V1__GroupSpec *spec)
{
    ep__v1__attach_token__free_unpacked(spec->attach_token, NULL);
    spec->attach_token = NULL;
}

static void create_with(struct fixture *f, const char *token)
{
    Ep__V1__GroupSpec spec = small_spec();

    set_token(&spec, token);
    create(f, "moe", &spec);
    drop_token(&spec);
}

/* NULL: takes it away. */
static void change_to(struct fixture *f, const char *token)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    if (token)
        set_token(&spec, token);
    answer = update(f, "moe", 0, &spec, "attach_token");
    assert_string_equal(answer.error.text, "");
    answer_clear(&answer);
    if (token)
        drop_token(&spec);
}

static ep_status claim_with(struct fixture *f, struct worker *worker, const char *token, struct ep_error *error)
{
    ep_status status;

    f->identity.token = token;
    status = claim(f, worker, "moe", 0, error);
    f->identity.token = NULL;
    return status;
}

static void takes(struct fixture *f, const char *token)
{
    struct ep_error error = EP_ERROR_INIT;
    struct worker w;

    while (claim_with(f, &w, token, &error) == EP_UNAVAILABLE)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_string_equal(error.status ? error.text : "", "");
    assert_non_null(w.membership);
    release(&w, false);
}

static void refuses(struct fixture *f, const char *token, const char *why)
{
    struct ep_error error = EP_ERROR_INIT;
    struct worker w;

    assert_int_equal(claim_with(f, &w, token, &error), EP_PERMISSION_DENIED);
    assert_non_null(strstr(error.text, why));
}

/* ---- what is asked for ----------------------------------------------------------------------------- */

static void a_token_becomes_a_salted_hash(void **state)
{
    Ep__V1__GroupSpec a = small_spec(), b = small_spec();

    (void)state;
    set_token(&a, TOKEN);
    set_token(&b, TOKEN);
    assert_int_equal(a.attach_token->state_case, STATE(HASH));
    assert_memory_equal(a.attach_token->hash, "$y$", 3);
    assert_string_not_equal(a.attach_token->hash, b.attach_token->hash);
    assert_int_equal(ep_groups_seal_token(&a, true, NULL), EP_OK); /* by a server, once more: as it is */
    assert_int_equal(a.attach_token->state_case, STATE(HASH));
    drop_token(&a);
    drop_token(&b);
}

static void a_token_has_1_to_256_bytes(void **state)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;
    char token[EP_ATTACH_TOKEN_MAX + 2];

    (void)state;
    memset(token, 'x', sizeof token);
    token[EP_ATTACH_TOKEN_MAX + 1] = '\0';
    spec.attach_token = token_message(token);
    assert_int_equal(ep_groups_seal_token(&spec, false, &error), EP_INVALID_ARGUMENT);
    assert_string_equal(error.text, "attach_token.token has 257 bytes: must have 1 to 256");
    drop_token(&spec);
    spec.attach_token = token_message("");
    assert_int_equal(ep_groups_seal_token(&spec, false, &error), EP_INVALID_ARGUMENT);
    drop_token(&spec);
    token[EP_ATTACH_TOKEN_MAX] = '\0';
    set_token(&spec, token);
    drop_token(&spec);
}

static void nobody_but_a_server_gives_a_hash(void **state)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct ep_error error = EP_ERROR_INIT;

    (void)state;
    set_token(&spec, TOKEN);
    assert_int_equal(ep_groups_seal_token(&spec, false, &error), EP_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "attach_token.hash is given: servers alone"));
    drop_token(&spec);
}

static void an_empty_token_message_is_none(void **state)
{
    Ep__V1__GroupSpec spec = small_spec();

    (void)state;
    spec.attach_token = calloc(1, sizeof *spec.attach_token);
    ep__v1__attach_token__init(spec.attach_token);
    assert_int_equal(ep_groups_seal_token(&spec, false, NULL), EP_OK);
    assert_null(spec.attach_token);
}

static void that_there_is_one_means_the_present_one(void **state)
{
    struct fixture *f = *state;
    Ep__V1__AttachToken there = EP__V1__ATTACH_TOKEN__INIT;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    there.state_case = STATE(SET);
    there.set = true;
    spec.attach_token = &there;
    answer = create_refused(f, "moe", &spec);
    assert_int_equal(answer.error.status, EP_INVALID_ARGUMENT);
    assert_non_null(strstr(answer.error.text, "attach_token.set is true: the group has no token"));
    create_with(f, TOKEN);
    answer = update(f, "moe", 0, &spec, "attach_token");
    assert_string_equal(answer.error.text, "");
    answer_clear(&answer);
    takes(f, TOKEN);
    refuses(f, OTHER, "not the attach token of group moe");
    change_to(f, NULL);
    answer = update(f, "moe", 0, &spec, "attach_token");
    assert_int_equal(answer.error.status, EP_INVALID_ARGUMENT);
}

/* ---- claims ------------------------------------------------------------------------------------------ */

static void a_claim_needs_the_token(void **state)
{
    struct fixture *f = *state;
    char long_one[EP_ATTACH_TOKEN_MAX + 2];

    memset(long_one, 'x', sizeof long_one);
    long_one[sizeof long_one - 1] = '\0';
    create_with(f, TOKEN);
    refuses(f, NULL, "group moe wants an attach token: give it by ep_join_options.token, or a file that "
                     "EP_ATTACH_TOKEN_FILE names (--token-file");
    refuses(f, "", "group moe wants an attach token");
    refuses(f, OTHER, "that is not the attach token of group moe");
    refuses(f, TOKEN "x", "that is not");
    refuses(f, long_one, "that is not");
    takes(f, TOKEN);
}

static void without_a_token_nothing_is_told_of_ranks(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct worker w, second;

    create_with(f, TOKEN);
    assert_int_equal(claim_with(f, &w, TOKEN, NULL), EP_OK);
    assert_int_equal(claim_with(f, &second, OTHER, &error), EP_PERMISSION_DENIED);
    assert_null(strstr(error.text, "held"));
    assert_int_equal(claim_with(f, &second, TOKEN, &error), EP_ALREADY_EXISTS);
    release(&w, false);
}

static void a_group_without_one_takes_any(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();

    create(f, "moe", &spec);
    takes(f, NULL);
    takes(f, TOKEN);
}

static void a_change_is_for_later_claims(void **state)
{
    struct fixture *f = *state;
    Ep__V1__GroupSpec spec = small_spec();
    struct worker w;

    create(f, "moe", &spec);
    join(f, &w, "moe", 1);
    change_to(f, TOKEN);
    assert_int_equal(get(f, "moe")->status->epoch, 1);
    assert_int_equal(rank_state(f, "moe", 1), EP__V1__RANK_STATE__RANK_STATE_ATTACHED);
    assert_int_equal(w.detached + w.draining + w.epochs, 0);
    refuses(f, NULL, "wants");
    change_to(f, OTHER);
    refuses(f, TOKEN, "that is not");
    takes(f, OTHER);
    change_to(f, NULL);
    takes(f, NULL);
    assert_int_equal(rank_state(f, "moe", 1), EP__V1__RANK_STATE__RANK_STATE_ATTACHED);
    release(&w, false);
}

static void it_survives_a_restart(void **state)
{
    struct fixture *f = *state;

    create_with(f, TOKEN);
    fixture_restart(f);
    refuses(f, NULL, "wants");
    takes(f, TOKEN);
}

static void on_turn(const struct ep_group_turn *turn, void *user)
{
    (void)turn, (void)user;
}

/* A worker that follows has a rank of epoch 1. */
static void attach_follower(struct fixture *f, struct worker *w)
{
    create_with(f, TOKEN);
    f->identity.on_turn = on_turn;
    assert_int_equal(claim_with(f, w, TOKEN, NULL), EP_OK);
    attach(w);
}

/* Epoch 2 is there, and claims are of successors in it. */
static void begin_succession(struct fixture *f)
{
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;

    spec.ll_max_tokens = 32;
    answer = update(f, "moe", 0, &spec, "ll_max_tokens");
    assert_string_equal(answer.error.text, "");
    answer_clear(&answer);
    f->identity.after = 1;
}

static void who_follows_needs_none(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct worker w, next;

    attach_follower(f, &w);
    change_to(f, OTHER);
    begin_succession(f);
    f->identity.pid++; /* who says so, and does not hold the rank */
    assert_int_equal(claim_with(f, &next, NULL, &error), EP_FAILED_PRECONDITION);
    f->identity.pid--;
    assert_int_equal(claim_with(f, &next, NULL, &error), EP_OK);
    f->identity.after = 0;
    release(&next, false);
    release(&w, false);
}

/* Of processes that the server cannot see one is like the other: who holds the rank shows its ticket (server/attach). */
static void who_follows_unseen_shows_that_it_holds_the_rank(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    struct worker w, next;

    f->identity.pid = 0;
    attach_follower(f, &w);
    begin_succession(f);
    assert_int_equal(claim_with(f, &next, NULL, &error), EP_PERMISSION_DENIED);
    assert_non_null(strstr(error.text, "the ticket of rank 0 of group moe in that epoch was not given"));
    f->identity.holds = true;
    assert_int_equal(claim_with(f, &next, NULL, &error), EP_OK);
    f->identity.after = 0;
    release(&next, false);
    release(&w, false);
}

static void guesses_are_bounded_for_each_user(void **state)
{
    struct fixture *f = *state;
    struct ep_error error = EP_ERROR_INIT;
    const uid_t uid = f->identity.uid;
    uint64_t second;
    struct worker w;

    create_with(f, TOKEN);
    uv_update_time(&f->loop);
    second = uv_now(&f->loop) / 1000;
    for (int i = 0; i < 10; i++)
        refuses(f, OTHER, "that is not");
    assert_int_equal(claim_with(f, &w, TOKEN, &error), EP_UNAVAILABLE);
    assert_non_null(strstr(error.text, "has given 10 wrong ones within a second: try again"));
    f->identity.uid = uid + 1;
    assert_int_equal(claim_with(f, &w, TOKEN, NULL), EP_OK);
    release(&w, false);
    f->identity.uid = uid;
    while (uv_now(&f->loop) / 1000 == second) {
        usleep(10000);
        uv_update_time(&f->loop);
    }
    takes(f, TOKEN);
}

/* ---- who sees it -------------------------------------------------------------------------------------- */

static bool shows(const ProtobufCMessage *message, const char *text)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    uint8_t *bytes = malloc(size + 1);
    bool found;

    protobuf_c_message_pack(message, bytes);
    found = memmem(bytes, size, text, strlen(text)) != NULL;
    free(bytes);
    return found;
}

static void check_shown(const Ep__V1__GroupSpec *spec)
{
    assert_int_equal(spec->attach_token->state_case, STATE(SET));
    assert_true(spec->attach_token->set);
    assert_false(shows(&spec->base, "$y$"));
}

static void operators_and_workers_see_that_there_is_one(void **state)
{
    struct fixture *f = *state;
    struct ep_membership_info info;
    Ep__V1__GroupSpec spec = small_spec();
    struct answer answer;
    struct worker w;

    create_with(f, TOKEN);
    check_shown(get(f, "moe")->spec);
    assert_false(shows(&get(f, "moe")->base, "$y$"));
    assert_int_equal(claim_with(f, &w, TOKEN, NULL), EP_OK);
    ep_membership_info(w.membership, &info);
    check_shown(info.spec);
    release(&w, false);
    set_token(&spec, OTHER);
    answer = update(f, "moe", 0, &spec, "attach_token");
    check_shown(answer.group->spec);
    answer_clear(&answer);
    drop_token(&spec);
    change_to(f, NULL);
    assert_null(get(f, "moe")->spec->attach_token);
}

static void history_tells_of_changes_alone(void **state)
{
    static const char *const to[] = { "set", "another", "" };
    struct fixture *f = *state;
    Ep__V1__GroupChange *list[EP_GROUP_HISTORY];
    size_t n;

    create_with(f, TOKEN);
    change_to(f, OTHER);
    change_to(f, NULL);
    assert_int_equal(ep_groups_history(f->groups, "moe", list, &n, NULL), EP_OK);
    assert_int_equal(n, 3);
    for (size_t i = 0; i < n; i++) {
        const Ep__V1__FieldChange *field = NULL;

        for (size_t j = 0; j < list[i]->n_fields; j++)
            if (!strcmp(list[i]->fields[j]->field, "attach_token"))
                field = list[i]->fields[j];
        assert_non_null(field);
        assert_string_equal(field->from, i ? "set" : "");
        assert_string_equal(field->to, to[i]);
        assert_false(shows(&list[i]->base, "$y$"));
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_token_becomes_a_salted_hash),
        cmocka_unit_test(a_token_has_1_to_256_bytes),
        cmocka_unit_test(nobody_but_a_server_gives_a_hash),
        cmocka_unit_test(an_empty_token_message_is_none),
        TEST(that_there_is_one_means_the_present_one),
        TEST(a_claim_needs_the_token),
        TEST(without_a_token_nothing_is_told_of_ranks),
        TEST(a_group_without_one_takes_any),
        TEST(a_change_is_for_later_claims),
        TEST(it_survives_a_restart),
        TEST(who_follows_needs_none),
        TEST(who_follows_unseen_shows_that_it_holds_the_rank),
        TEST(guesses_are_bounded_for_each_user),
        TEST(operators_and_workers_see_that_there_is_one),
        TEST(history_tells_of_changes_alone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
