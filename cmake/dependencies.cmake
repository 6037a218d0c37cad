# What we use from outside, in one place.  README lists the packages and why.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(PROTOBUF_C  REQUIRED IMPORTED_TARGET libprotobuf-c)
pkg_check_modules(UV          REQUIRED IMPORTED_TARGET libuv)
pkg_check_modules(SQLITE3     REQUIRED IMPORTED_TARGET sqlite3)
pkg_check_modules(YAML        REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(JANSSON     REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(MICROHTTPD  REQUIRED IMPORTED_TARGET libmicrohttpd)
pkg_check_modules(SMARTCOLS   REQUIRED IMPORTED_TARGET smartcols)
pkg_check_modules(SYSTEMD     REQUIRED IMPORTED_TARGET libsystemd)
pkg_check_modules(XXHASH      REQUIRED IMPORTED_TARGET libxxhash)
if(EP_TESTS)
  pkg_check_modules(CMOCKA IMPORTED_TARGET cmocka)
  if(NOT CMOCKA_FOUND)
    message(STATUS "cmocka is not installed (deploy/setup.sh --tests): the unit tests are not built")
  endif()
endif()

# find_package(gRPC) wants the C++ plug-in and headers; the C core needs two libraries.
find_library(GRPC_LIBRARY grpc REQUIRED)
find_library(GPR_LIBRARY gpr REQUIRED)
add_library(ep_grpc INTERFACE)
target_link_libraries(ep_grpc INTERFACE ${GRPC_LIBRARY} ${GPR_LIBRARY})

find_library(CRYPT_LIBRARY crypt REQUIRED) # libxcrypt, which has no .pc file everywhere

find_program(PROTOC protoc REQUIRED)
find_program(PROTOC_GEN_C protoc-gen-c REQUIRED)
find_path(PROTOBUF_INCLUDE google/protobuf/descriptor.proto REQUIRED)

include(cmake/cuda.cmake) # absent on most machines
