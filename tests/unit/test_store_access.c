/* The etcd store and who may use it: users, whose tokens etcd forgets, and TLS. */
#include "store_fixture.h"

static void make_users(struct fixture *f)
{
    cluster_post(&f->etcd, "/v3/auth/user/add", "{\"name\": \"root\", \"password\": \"secret\"}");
    cluster_post(&f->etcd, "/v3/auth/role/add", "{\"name\": \"root\"}");
    cluster_post(&f->etcd, "/v3/auth/user/grant", "{\"user\": \"root\", \"role\": \"root\"}");
    cluster_post(&f->etcd, "/v3/auth/user/add", "{\"name\": \"nobody\", \"password\": \"secret\"}");
    cluster_post(&f->etcd, "/v3/auth/enable", "{}");
}

static void make_certificates(const char *directory)
{
    shell(
        "cd %s && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca "
        "-keyout ca.key -out ca.pem 2>/dev/null",
        directory);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "client" : "server";

        shell("cd %s && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=%s -keyout "
              "%s.key "
              "-out %s.csr 2>/dev/null && printf "
              "'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth' "
              "> %s.ext && openssl x509 -req -in %s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
              "-extfile "
              "%s.ext -out %s.pem 2>/dev/null",
              directory, name, name, name, name, name, name, name);
    }
}

/* What a login needs, in the fixture's directory. */
struct credentials {
    char url[128], ca[96], cert[96], key[96], password[96];
};

static struct credentials credentials_of(struct fixture *f, const char *password)
{
    struct credentials c;

    cluster_url(&f->etcd, "/test", c.url, sizeof c.url);
    snprintf(c.ca, sizeof c.ca, "%s/ca.pem", f->directory);
    snprintf(c.cert, sizeof c.cert, "%s/client.pem", f->directory);
    snprintf(c.key, sizeof c.key, "%s/client.key", f->directory);
    snprintf(c.password, sizeof c.password, "%s/password", f->directory);
    shell("printf '%s\\n' > %s", password, c.password);
    return c;
}

static void expect_refused(struct fixture *f, const struct ep_store_etcd *options, ep_status status,
                           const char *why)
{
    struct ep_store *store = open_at(f, options);
    struct listed listed = list_of(f, store, "");

    assert_int_equal(listed.error.status, status);
    assert_text(listed.error.text, why);
    close_store(f, store);
}

static void users_log_in_and_again_when_etcd_has_forgotten_them(void **state)
{
    struct fixture *f = *state;
    struct seen seen = { 0 };
    struct told told = { 0 };
    struct ep_session *session;
    struct ep_watch *watch;
    struct ep_store_etcd options;
    struct credentials c;

    cluster_start(&f->etcd, 1, f->directory);
    make_users(f);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){
        .url = c.url, .user = "root", .password_file = c.password, .answer_within_ms = ANSWER_WITHIN_MS
    };
    f->store = open_at(f, &options);
    put_surely(f, "k/a", "1");
    watch = ep_watch_open(f->store, "k/", EP_STORE_BEGIN, on_changes, &seen);
    session = ep_session_open(f->store, 15000, on_session, &told);
    RUN_UNTIL(f, seen.calls == 1 && told.begun);
    cluster_kill_member(&f->etcd, 0); /* its tokens are gone with it */
    cluster_start_member(&f->etcd, 0);
    put_surely(f, "k/a", "2");
    RUN_UNTIL(f, seen.changes == 1);
    fixture_run_ms(f, 6000); /* a renewal */
    assert_true(ep_session_alive(session));
    ep_watch_close(watch);
    ep_session_close(session);

    options.user = "nobody";
    expect_refused(f, &options, EP_PERMISSION_DENIED, "permission denied");
    options.user = NULL;
    expect_refused(f, &options, EP_UNAUTHENTICATED, "asks for a user");
    options.user = "root";
    shell("printf wrong > %s", c.password);
    expect_refused(f, &options, EP_UNAUTHENTICATED, "etcd refuses user root");
    options.password_file = "/no/such/file";
    expect_refused(f, &options, EP_UNAUTHENTICATED, "/no/such/file");
    shell("rm %s && mkfifo %s", c.password, c.password); /* that nobody writes to */
    options.password_file = c.password;
    expect_refused(f, &options, EP_UNAUTHENTICATED, "holds no password");
}

static void a_user_where_there_are_none_is_told(void **state)
{
    struct fixture *f = *state;
    struct ep_store_etcd options;
    struct credentials c;

    cluster_start(&f->etcd, 1, f->directory);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){
        .url = c.url, .user = "root", .password_file = c.password, .answer_within_ms = ANSWER_WITHIN_MS
    };
    expect_refused(f, &options, EP_UNAUTHENTICATED, "authentication is not enabled");
}

static void tls_with_certificates_on_both_sides(void **state)
{
    struct fixture *f = *state;
    struct ep_store_etcd options;
    struct credentials c;

    make_certificates(f->directory);
    cluster_start(&f->etcd, 1, f->directory);
    make_users(f);
    cluster_kill_member(&f->etcd, 0);
    f->etcd.tls = true;
    cluster_start_member(&f->etcd, 0);
    c = credentials_of(f, "secret");
    options = (struct ep_store_etcd){ .url = c.url,
                                      .ca = c.ca,
                                      .cert = c.cert,
                                      .key = c.key,
                                      .user = "root",
                                      .password_file = c.password,
                                      .answer_within_ms = ANSWER_WITHIN_MS };
    f->store = open_at(f, &options);
    put_surely(f, "a", "1");
    assert_string_equal(list_surely(f, "").text, "a=1 ");
    options.cert = options.key = NULL; /* etcd asks for one */
    expect_refused(f, &options, EP_UNAVAILABLE, "127.0.0.1");
    options.ca = NULL;
    expect_refused(f, &options, EP_UNAVAILABLE, "does the server expect TLS?");
}

#define TEST(name) FIXTURE_TEST(#name, name, fixture_setup_etcd)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(users_log_in_and_again_when_etcd_has_forgotten_them),
        TEST(a_user_where_there_are_none_is_told),
        TEST(tls_with_certificates_on_both_sides),
    };
    if (!cluster_installed()) {
        fprintf(stderr, "etcd is not installed (package etcd-server): nothing of the etcd store is tested\n");
        return 77;
    }
    cmocka_set_test_filter(argc == 2 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
