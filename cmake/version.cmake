# EP_COMMIT: the commit this was built from, "unknown" outside a checkout.
execute_process(COMMAND git -C ${CMAKE_SOURCE_DIR} rev-parse --short=12 HEAD
                OUTPUT_VARIABLE EP_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT EP_COMMIT)
  set(EP_COMMIT unknown)
endif()
